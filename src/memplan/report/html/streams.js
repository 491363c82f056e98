// A step on the card's streams: a lane for each, nanoseconds to the right.

const PAINTS = { forward: "parameters", backward: "gradients", optimizer: "optimizer_state" };

class Streams extends Figure {
  constructor(table) {
    super(new View(table.end), "step", [6, 12, 28, 74]);
    this.table = table;
    this.rows = table.lanes.map(() => []);
    table.columns.lane.forEach((lane, row) => this.rows[lane].push(row));
    this.lane = 0;
  }

  get high() {
    return this.area.height / this.table.lanes.length;
  }

  paintOf(row) {
    const { exchange, phase } = this.table.columns;
    return exchange[row] ? "communication" : (PAINTS[this.table.phases[phase[row]]] ?? "unknown");
  }

  draw(pen, area) {
    const { begin, life } = this.table.columns;
    const { from, to } = this.view;
    this.rows.forEach((rows, lane) => {
      const top = area.top + lane * this.high;
      pen.fillStyle = colour("quiet");
      pen.fillRect(area.left, top + 1, area.width, this.high - 2);
      for (const row of rows) {
        const end = begin[row] + life[row];
        if (end <= from || begin[row] >= to) continue;
        const left = Math.max(this.x(begin[row]), area.left);
        const width = Math.min(this.x(end), area.left + area.width) - left;
        pen.fillStyle = colour(this.paintOf(row));
        pen.fillRect(left, top + 2, Math.max(width - (width > 4 ? 0.6 : 0), 0.4), this.high - 4);
      }
      this.name(pen, area, lane, top);
    });
    this.axis(pen, area);
  }

  name(pen, area, lane, top) {
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const chosen = document.activeElement === this.canvas && lane === this.lane;
    pen.fillStyle = colour(chosen ? "ink" : "dim");
    pen.fillText(this.table.lanes[lane][0], area.left - 8, top + this.high / 2);
  }

  axis(pen, area) {
    const { from, to } = this.view;
    const step = niceTime((to - from) / 7);
    pen.fillStyle = colour("dim");
    pen.textAlign = "left";
    for (let at = Math.ceil(from / step) * step; at < to; at += step) {
      pen.fillRect(this.x(at), area.top + area.height, 1, 5);
      pen.fillText(time(at, step), this.x(at) + 3, area.top + area.height + 14);
    }
  }

  answer(at, y) {
    const lane = Math.floor((y - this.area.top) / this.high);
    if (lane < 0 || lane >= this.rows.length) return null;
    const { begin, life } = this.table.columns;
    // A kernel is often thinner than a pixel.
    const slack = (this.view.to - this.view.from) / this.area.width;
    const near = this.rows[lane].filter((row) => begin[row] - slack <= at && at < begin[row] + life[row] + slack);
    this.lane = lane;
    if (!near.length) return { lines: [`${this.table.lanes[lane].join(", ")}: idle`, `at ${time(at, at / 1000)}`] };
    return this.said(near.reduce((a, b) => (life[b] > life[a] ? b : a)));
  }

  said(row) {
    const { begin, life, label, phase, lane } = this.table.columns;
    const { strings, labels, phases, lanes } = this.table;
    const [name, module, source] = labels[label[row]].map((number) => strings[number]);
    return {
      lines: [
        [name, module].filter(Boolean).join(" in "),
        `${time(life[row], life[row] / 100)}, from ${time(begin[row], life[row])} on; ${lanes[lane[row]][0]}, ${phases[phase[row]]}`,
        source,
      ],
    };
  }

  key(e) {
    const by = { ArrowUp: -1, ArrowDown: 1 }[e.key];
    if (!by) return super.key(e);
    e.preventDefault();
    this.lane = Math.min(Math.max(this.lane + by, 0), this.rows.length - 1);
    this.step(0);
  }

  // To the lane's next slice, the one before, or, for 0, the nearest.
  step(by) {
    const { begin, life } = this.table.columns;
    const at = this.view.cursor ?? (this.view.from + this.view.to) / 2;
    const middle = (row) => begin[row] + life[row] / 2;
    const rows = this.rows[this.lane].filter((row) => by === 0 || (middle(row) - at) * by > 0);
    if (!rows.length) return;
    const row = rows.reduce((a, b) => (Math.abs(middle(b) - at) < Math.abs(middle(a) - at) ? b : a));
    this.goTo(row, middle(row));
  }

  toPeak() {
    const { life, exchange, lane } = this.table.columns;
    const rows = [...life.keys()];
    const wanted = rows.filter((row) => exchange[row]);
    const row = (wanted.length ? wanted : rows).reduce((a, b) => (life[b] > life[a] ? b : a));
    this.lane = lane[row];
    this.goTo(row, this.table.columns.begin[row] + life[row] / 2);
  }

  goTo(row, at) {
    const { view } = this;
    const half = (view.to - view.from) / 2;
    if (at < view.from || at > view.to) view.show(at - half, at + half);
    view.cursor = at;
    view.redraw();
    const box = this.canvas.getBoundingClientRect();
    showTip(this.said(row), box.left + this.x(at), box.top + this.area.top + (this.lane + 0.5) * this.high);
  }
}

function niceTime(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least);
}

// Nanoseconds as text, as exact as `step` asks for.
function time(nanoseconds, step) {
  if (nanoseconds === 0) return "0";
  const units = [["s", 1e9], ["ms", 1e6], ["µs", 1e3]];
  const [name, unit] = units.find(([, unit]) => nanoseconds >= unit) ?? ["ns", 1];
  const digits = Math.max(Math.ceil(Math.log10(unit / step)), 0);
  return `${+(nanoseconds / unit).toFixed(digits)} ${name}`;
}
