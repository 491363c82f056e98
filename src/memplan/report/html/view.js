// The range of events that all figures show, how it is moved, and the box that answers a hover.

class View {
  constructor(events) {
    Object.assign(this, { events, from: 0, to: events, cursor: null, figures: [], waiting: false });
  }

  show(from, to) {
    const least = Math.min(8, this.events);
    const width = Math.min(Math.max(to - from, least), this.events);
    this.from = Math.min(Math.max(from, 0), this.events - width);
    this.to = this.from + width;
    this.redraw();
  }

  zoom(factor, around) {
    const width = (this.to - this.from) * factor;
    this.show(around - ((around - this.from) / (this.to - this.from)) * width, around + ((this.to - around) / (this.to - this.from)) * width);
  }

  move(share) {
    const by = share * (this.to - this.from);
    this.show(this.from + by, this.to + by);
  }

  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => this.drawNow());
  }

  drawNow() {
    this.waiting = false;
    for (const figure of this.figures) figure.paint();
  }
}

// A canvas with margins that follows the view; subclasses draw and answer.
class Figure {
  constructor(view, id, margins) {
    this.view = view;
    this.canvas = document.getElementById(id);
    this.margins = margins;
    view.figures.push(this);
    this.listen();
    new ResizeObserver(() => view.redraw()).observe(this.canvas);
  }

  paint() {
    const scale = window.devicePixelRatio || 1;
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    if (!width) return;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const [top, right, bottom, left] = this.margins;
    this.area = { left, top, width: width - left - right, height: height - top - bottom };
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
    this.draw(pen, this.area);
    this.cursorLine(pen, this.area);
    this.canvas.dataset.from = this.view.from;
    this.canvas.dataset.to = this.view.to;
  }

  x(event) {
    return this.area.left + ((event - this.view.from) / (this.view.to - this.view.from)) * this.area.width;
  }

  eventAt(x) {
    return this.view.from + ((x - this.area.left) / this.area.width) * (this.view.to - this.view.from);
  }

  cursorLine(pen, { top, height }) {
    const { cursor, from, to } = this.view;
    if (cursor === null || cursor < from || cursor > to) return;
    pen.strokeStyle = colour("ink");
    pen.globalAlpha = 0.5;
    pen.beginPath();
    pen.moveTo(this.x(cursor), top);
    pen.lineTo(this.x(cursor), top + height);
    pen.stroke();
    pen.globalAlpha = 1;
  }

  listen() {
    const { canvas, view } = this;
    let dragged = null;
    canvas.addEventListener("wheel", (e) => {
      e.preventDefault();
      if (Math.abs(e.deltaX) > Math.abs(e.deltaY)) view.move(e.deltaX / 1000);
      else view.zoom(Math.exp(e.deltaY / 400), this.eventAt(e.offsetX));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (e) => {
      dragged = { x: e.offsetX, from: view.from, to: view.to };
      canvas.setPointerCapture(e.pointerId);
    });
    canvas.addEventListener("pointerup", () => (dragged = null));
    canvas.addEventListener("pointermove", (e) => {
      if (dragged) {
        const by = ((dragged.x - e.offsetX) / this.area.width) * (dragged.to - dragged.from);
        view.show(dragged.from + by, dragged.to + by);
      } else this.point(e.offsetX, e.offsetY, e.clientX, e.clientY);
    });
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("dblclick", () => view.show(0, view.events));
    canvas.addEventListener("keydown", (e) => this.key(e));
    canvas.addEventListener("blur", () => this.leave());
  }

  point(x, y, clientX, clientY) {
    const event = Math.min(Math.max(this.eventAt(x), 0), this.view.events - 1);
    this.view.cursor = event;
    this.view.redraw();
    showTip(this.answer(event, y), clientX, clientY);
  }

  leave() {
    this.view.cursor = null;
    this.view.redraw();
    document.getElementById("tip").hidden = true;
  }

  key(e) {
    const { view } = this;
    const middle = view.cursor ?? (view.from + view.to) / 2;
    const step = (view.to - view.from) / this.area.width;
    const actions = {
      "+": () => view.zoom(0.5, middle), "=": () => view.zoom(0.5, middle),
      "-": () => view.zoom(2, middle), "0": () => view.show(0, view.events),
      "Home": () => view.show(0, view.events), "p": () => this.toPeak(),
      "ArrowLeft": () => (e.shiftKey ? this.step(-Math.max(1, 4 * step)) : view.move(-0.2)),
      "ArrowRight": () => (e.shiftKey ? this.step(Math.max(1, 4 * step)) : view.move(0.2)),
      "Escape": () => this.leave(),
    };
    if (!actions[e.key] || e.ctrlKey || e.metaKey) return;
    e.preventDefault();
    actions[e.key]();
  }

  step(by) {
    const { view } = this;
    const event = Math.min(Math.max((view.cursor ?? (view.from + view.to) / 2) + by, 0), view.events - 1);
    if (event < view.from || event > view.to) view.move(Math.sign(by) * 0.5);
    const box = this.canvas.getBoundingClientRect();
    const y = this.area.top + this.area.height / 2;
    this.point(this.x(event), y, box.left + this.x(event), box.top + y);
  }

  toPeak() {
    const { view } = this;
    const width = Math.min(view.to - view.from, Math.max(200, view.events / 20));
    view.show(view.peak - width / 2, view.peak + width / 2);
    view.cursor = view.peak;
    this.step(0);
  }
}

let colours = {};
function colour(name) {
  return (colours[name] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
}

// `said`: {lines: [text], rows: [[colour, name, value]]}. Names are foreign: text, never markup.
function showTip(said, x, y) {
  const tip = document.getElementById("tip");
  tip.replaceChildren();
  if (!said) return void (tip.hidden = true);
  said.lines.filter(Boolean).forEach((text, number) => {
    const line = document.createElement("p");
    line.textContent = text;
    if (number) line.className = "dim";
    else line.style.fontWeight = 600;
    tip.append(line);
  });
  if (said.rows?.length) {
    const table = tip.appendChild(document.createElement("table"));
    for (const [band, name, value] of said.rows) {
      const row = table.insertRow();
      const swatch = row.insertCell().appendChild(document.createElement("span"));
      swatch.className = `swatch fill ${band}`;
      row.insertCell().textContent = name;
      const cell = row.insertCell();
      cell.textContent = value;
      cell.className = "number";
    }
  }
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, x + 16 + box.width > innerWidth ? x - box.width - 16 : x + 16)}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 12, innerHeight - box.height - 8))}px`;
  document.getElementById("said").textContent = said.lines.filter(Boolean).join(". ");
}
