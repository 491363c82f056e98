// Memory by category over time, with strips of steps, phases and modules below it.

const STRIP = 18;

class Timeline extends Figure {
  constructor(view, job) {
    super(view, "timeline", [10, 12, 26 + 3 * STRIP, 74]);
    this.job = job;
    this.levels = [];
  }

  // Adds a level of detail; column names begin with its number.
  addLevel(number, columns) {
    const of = (name) => columns[`${number}.${name}`];
    const bands = this.job.bands.map((_, band) => of(`band${band}`));
    const total = new Float64Array(bands[0].length);
    for (const band of bands) band.forEach((value, row) => (total[row] += value));
    const names = ["event", "origin", "label", "size", "phase", "step", "reserved"];
    const level = { width: this.job.widths[number], bands, total };
    for (const name of names) level[name] = of(name);
    this.levels.push(level);
    if (number) return;
    const most = Math.max(1, level.reserved.reduce((a, b) => Math.max(a, b), 0));
    // A card far larger than the job would flatten the picture.
    this.room = this.job.room && this.job.room < 1.6 * most * this.job.unit ? this.job.room / this.job.unit : null;
    this.top = Math.max(most, this.room ?? 0) * 1.04;
  }

  // The coarsest level whose buckets are no wider than a pixel; else the finest there is.
  level() {
    const events = (this.view.to - this.view.from) / this.area.width;
    return this.levels.find((level) => level.width <= events) ?? this.levels.at(-1);
  }

  // Of each column of pixels, the row at which the most is asked for.
  columns(level) {
    const { from, to } = this.view;
    const first = Math.max(0, Math.floor(from / level.width));
    const last = Math.min(level.total.length - 1, Math.floor((to - 1e-9) / level.width));
    const found = [];
    for (let row = first; row <= last; row++) {
      const x = Math.max(this.x(row * level.width), this.area.left);
      const pixel = Math.floor(x);
      const before = found.at(-1);
      if (before && before.pixel === pixel) {
        if (level.total[row] > level.total[before.row]) before.row = row;
      } else found.push({ pixel, x, row });
    }
    return found;
  }

  draw(pen, area) {
    const level = this.level();
    const columns = this.columns(level);
    const y = (value) => area.top + area.height * (1 - value / this.top);
    const right = area.left + area.width;
    const fill = (name, low, high) => {
      pen.fillStyle = colour(name);
      pen.beginPath();
      columns.forEach((c, i) => {
        pen.lineTo(c.x, y(high[i]));
        pen.lineTo(columns[i + 1]?.x ?? right, y(high[i]));
      });
      for (let i = columns.length - 1; i >= 0; i--) {
        pen.lineTo(columns[i + 1]?.x ?? right, y(low[i]));
        pen.lineTo(columns[i].x, y(low[i]));
      }
      pen.fill();
    };
    let low = columns.map(() => 0);
    fill("fragmentation", low, columns.map((c) => level.reserved[c.row]));
    this.job.bands.forEach((name, band) => {
      const high = columns.map((c, i) => low[i] + level.bands[band][c.row]);
      fill(name, low, high);
      low = high;
    });
    this.axes(pen, area, y);
    if (this.room) this.card(pen, area, y(this.room));
    this.strips(pen, area, level, columns);
  }

  axes(pen, area, y) {
    const bytes = this.top * this.job.unit;
    const step = niceStep(bytes / 7);
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (let value = 0; value <= bytes; value += step) {
      const at = y(value / this.job.unit);
      pen.strokeStyle = colour("line");
      pen.globalAlpha = value ? 0.55 : 1;
      pen.beginPath();
      pen.moveTo(area.left, at);
      pen.lineTo(area.left + area.width, at);
      pen.stroke();
      pen.globalAlpha = 1;
      pen.fillStyle = colour("dim");
      pen.fillText(value ? tick(value, step) : "0", area.left - 8, at);
    }
    pen.textAlign = "left";
    const { from, to } = this.view;
    const text = `events ${Math.floor(from).toLocaleString("en")} to ${Math.ceil(to).toLocaleString("en")}`;
    pen.fillText(text, area.left, area.top + area.height + 3 * STRIP + 16);
  }

  card(pen, area, height) {
    const at = Math.round(height) + 0.5;
    pen.strokeStyle = pen.fillStyle = colour("no");
    pen.setLineDash([6, 4]);
    pen.beginPath();
    pen.moveTo(area.left, at);
    pen.lineTo(area.left + area.width, at);
    pen.stroke();
    pen.setLineDash([]);
    pen.textAlign = "left";
    pen.fillText("room for PyTorch on the card", area.left + 6, at - 9);
  }

  strips(pen, area, level, columns) {
    const { strings, origins, phases } = this.job;
    const path = (row) => strings[origins[level.origin[row]]?.[1] ?? 0] || "";
    const texts = [
      ["step", (row) => `step ${level.step[row]}`],
      ["phase", (row) => phases[level.phase[row]]],
      ["module", this.moduleAt(path, columns)],
    ];
    texts.forEach(([name, text], strip) => {
      const top = area.top + area.height + 4 + strip * STRIP;
      pen.fillStyle = colour("dim");
      pen.textAlign = "right";
      pen.textBaseline = "middle";
      pen.fillText(name, area.left - 8, top + STRIP / 2);
      pen.textAlign = "left";
      runs(columns, text).forEach(({ from, to, value }) => {
        if (!value) return;
        const x = columns[from].x;
        const end = columns[to]?.x ?? area.left + area.width;
        pen.fillStyle = colour("quiet");
        pen.fillRect(x + 0.5, top + 1, Math.max(end - x - 1, 0.5), STRIP - 2);
        pen.fillStyle = colour("ink");
        pen.fillText(fitting(pen, value, end - x - 8), x + 5, top + STRIP / 2);
      });
    });
  }

  // As many components of module paths as leave runs wide enough to read.
  moduleAt(path, columns) {
    const cut = (depth) => (row) => path(row).split(".").slice(0, depth).join(".");
    let depth = 1;
    while (depth < 8 && runs(columns, cut(depth + 1)).length * 34 < this.area.width) depth++;
    return cut(depth);
  }

  answer(event) {
    const level = this.level();
    const row = Math.min(Math.floor(event / level.width), level.total.length - 1);
    const { strings, origins, labels, bands, phases, unit } = this.job;
    const [op, module, source] = (origins[level.origin[row]] ?? [0, 0, 0]).map((n) => strings[n]);
    const [name, shape, dtype] = labels[level.label[row]].map((n) => strings[n]);
    const made = level.size[row] ? `takes ${size(level.size[row])} ${shape} ${dtype} ${name}` : "";
    const rows = bands
      .map((band, number) => [band, band.replace("_", " "), level.bands[number][row] * unit])
      .filter(([, , value]) => value > 0)
      .sort((a, b) => b[2] - a[2])
      .map(([band, words, value]) => [band, words, size(value)]);
    const free = Math.max(level.reserved[row] - level.total[row], 0) * unit;
    if (free) rows.push(["fragmentation", "reserved, unused", size(free)]);
    return {
      lines: [
        `${[op, module].filter(Boolean).join(" in ") || "event"} · ${size(level.reserved[row] * unit)} reserved`,
        `event ${level.event[row].toLocaleString("en")}, step ${level.step[row]}, ${phases[level.phase[row]]}`,
        source,
        made,
      ],
      rows,
    };
  }
}

// The end of a path that fits: it says more than its beginning.
function fitting(pen, text, width) {
  const parts = text.split(".");
  while (parts.length && pen.measureText(parts.join(".")).width > width) parts.shift();
  return parts.join(".");
}

// Stretches of columns with one text: {from, to, value}, `to` excluded.
function runs(columns, text) {
  const found = [];
  columns.forEach((column, number) => {
    const value = text(column.row);
    if (found.at(-1)?.value === value) found.at(-1).to = number + 1;
    else found.push({ from: number, to: number + 1, value });
  });
  return found;
}

function niceStep(least) {
  let step = 2 ** Math.ceil(Math.log2(Math.max(least, 1)));
  const gib = 2 ** 30;
  if (least > gib / 2) {
    const power = 10 ** Math.floor(Math.log10(least / gib));
    step = [1, 2, 5, 10].map((n) => n * power * gib).find((n) => n >= least);
  }
  return step;
}

function tick(value, step) {
  const [name, unit] = step >= 2 ** 28 ? ["GiB", 2 ** 30] : step >= 2 ** 18 ? ["MiB", 2 ** 20] : ["KiB", 2 ** 10];
  return `${+(value / unit).toFixed(2)} ${name}`;
}
