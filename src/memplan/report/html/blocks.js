// Address by time: each storage is a rectangle where the allocator, or the plan, put it.

const MOST_DRAWN = 40000;

class BlockMap extends Figure {
  constructor(view, id, job, table) {
    super(view, id, [6, 12, 8, 74]);
    this.job = job;
    this.table = table;
    const { born, life, size: number, offset } = table.columns;
    this.bytes = number.map((row) => table.sizes[row]);
    const area = this.bytes.map((bytes, row) => bytes * life[row]);
    this.order = Uint32Array.from(born.keys()).sort((a, b) => area[b] - area[a]);
    this.low = offset.map((units) => units * job.unit);
  }

  y(offset) {
    return this.area.top + this.area.height * (1 - offset / this.table.height);
  }

  draw(pen, area) {
    const { from, to } = this.view;
    const { born, life, band } = this.table.columns;
    pen.save();
    pen.beginPath();
    pen.rect(area.left, area.top, area.width, area.height);
    pen.clip();
    pen.fillStyle = colour("fragmentation");
    for (const [start, end, offset, bytes] of this.table.ground) {
      if (end > from && start < to) this.rectangle(pen, start, end, offset, bytes, 0);
    }
    let drawn = 0;
    for (const row of this.order) {
      const end = born[row] + life[row];
      if (end <= from || born[row] >= to) continue;
      pen.fillStyle = colour(this.job.bands[band[row]]);
      this.rectangle(pen, born[row], end, this.low[row], this.bytes[row], 0.6);
      if (++drawn === MOST_DRAWN) break;
    }
    pen.restore();
    this.axis(pen, area);
  }

  rectangle(pen, start, end, offset, bytes, gap) {
    const [x, y] = [this.x(start), this.y(offset + bytes)];
    const [width, height] = [this.x(end) - x, this.y(offset) - y];
    pen.fillRect(x, y, Math.max(width - (width > 4 ? gap : 0), 0.4), Math.max(height - (height > 4 ? gap : 0), 0.4));
  }

  axis(pen, area) {
    const step = niceStep(this.table.height / 5);
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillStyle = colour("dim");
    for (let value = step; value <= this.table.height; value += step) {
      pen.fillText(tick(value, step), area.left - 8, this.y(value));
    }
  }

  answer(event, y) {
    const offset = (1 - (y - this.area.top) / this.area.height) * this.table.height;
    const { born, life, band, label, origin, stream } = this.table.columns;
    // A hair's breadth of tolerance: a block of one event is thinner than a pixel.
    const slack = (this.view.to - this.view.from) / this.area.width;
    const row = this.order.findLast((at) =>
      born[at] - slack <= event && event < born[at] + life[at] + slack &&
      this.low[at] <= offset && offset < this.low[at] + this.bytes[at]);
    if (row === undefined) return this.emptiness(event, offset);
    const { strings, origins, labels, bands } = this.job;
    const [name, shape, dtype] = labels[label[row]].map((n) => strings[n]);
    const [op, module, source] = (origins[origin[row]] ?? [0, 0, 0]).map((n) => strings[n]);
    const ended = born[row] + life[row];
    const until = ended >= this.view.events ? "to the end" : `to ${ended.toLocaleString("en")}`;
    const since = born[row] < 0 ? "from before the first event" : `event ${born[row].toLocaleString("en")}`;
    return {
      lines: [
        `${[name, shape, dtype].filter(Boolean).join(" ") || "a tensor"}, ${size(this.bytes[row])}`,
        [op, module].filter(Boolean).join(" in "),
        source,
        `${since} ${until}${stream[row] ? `, stream ${stream[row]}` : ""}`,
      ],
      rows: [[bands[band[row]], bands[band[row]].replace("_", " "), ""]],
    };
  }

  emptiness(event, offset) {
    const held = this.table.ground.some(([start, end, low, bytes]) =>
      start <= event && event < end && low <= offset && offset < low + bytes);
    return { lines: [held ? "reserved, used by nobody" : "not reserved then"] };
  }
}
