// Runs PyTorch's MemoryViz.js under Node on a snapshot and prints what it drew, as JSON.
//
//   node memory_viz_harness.mjs MemoryViz.js page.html
//
// page.html is what torch.cuda._memory_viz writes: a call of add_local_files with the pickle in
// base64. Unpickling, simulation and drawing are the viewer's own; only d3 and the page are
// replaced, by a tree of plain elements that keeps attributes, data, text and listeners.

import {mkdtempSync, readFileSync, rmSync, writeFileSync} from 'node:fs';
import {tmpdir} from 'node:os';
import {join} from 'node:path';
import {pathToFileURL} from 'node:url';

class Element {
  constructor(tag) {
    Object.assign(this, {tag, children: [], attributes: {}, listeners: {}, content: ''});
    this.parent = null;
  }
  add(tag) {
    const child = new Element(tag);
    child.parent = this;
    this.children.push(child);
    return child;
  }
  remove() {
    const siblings = this.parent.children;
    siblings.splice(siblings.indexOf(this), 1);
  }
  *all(tag) {
    for (const child of this.children) {
      if (child.tag === tag) {
        yield child;
      }
      yield* child.all(tag);
    }
  }
  scrollIntoViewIfNeeded() {}
  get options() {
    return this.children;
  }
  get value() {
    if (this.tag !== 'select') {
      return this.attributes.value;
    }
    const chosen = this.chosen ?? this.children[this.selectedIndex ?? 0]?.content ?? '';
    return String(chosen);
  }
  set value(text) {
    this.chosen = text;
  }
}

const page = new Element('html');
const roots = {head: page.add('head'), body: page.add('body')};
const d3 = {event: null};

const given = (value, element, index) =>
  typeof value === 'function' ? value.call(element, element.data, index) : value;

class Selection {
  constructor(elements, parent = null) {
    Object.assign(this, {elements, parent, entering: null});
  }
  append(tag) {
    if (this.entering === null) {
      return new Selection(this.elements.map(e => Object.assign(e.add(tag), {data: e.data})));
    }
    return new Selection(
      this.entering.map(data => Object.assign(this.parent.add(tag), {data})),
    );
  }
  selectAll(tag) {
    return new Selection(
      this.elements.flatMap(e => [...e.all(tag)]),
      this.elements[0],
    );
  }
  data(rows) {
    if (this.elements.length > 0) {
      throw new Error('only empty selections are joined with data');
    }
    this.entering = rows;
    return this;
  }
  enter() {
    return this;
  }
  attr(name, value) {
    this.elements.forEach((e, i) => {
      e.attributes[name] = given(value, e, i);
      if (/NaN|undefined/.test(String(e.attributes[name]))) {
        throw new Error(`${e.tag}: ${name} is ${e.attributes[name]}`);
      }
    });
    return this;
  }
  text(value) {
    this.elements.forEach((e, i) => (e.content = String(given(value, e, i))));
    return this;
  }
  html(value) {
    return this.text(value);
  }
  on(name, listener) {
    this.elements.forEach(e => (e.listeners[name] = listener));
    return this;
  }
  call(drawing) {
    drawing(this);
    return this;
  }
  remove() {
    this.elements.forEach(e => e.remove());
    return this;
  }
  node() {
    return this.elements[0];
  }
  datum() {
    return this.elements[0].data;
  }
}

function fire(element, name) {
  d3.event = {target: element, preventDefault() {}};
  element.listeners[name].call(element, element.data, 0);
}

d3.select = what => new Selection([typeof what === 'string' ? roots[what] : what]);
d3.format = () => String;

function scaleLinear() {
  let domain = [0, 1];
  let range = [0, 1];
  const scale = x =>
    range[0] + ((x - domain[0]) / (domain[1] - domain[0] || 1)) * (range[1] - range[0]);
  scale.invert = y =>
    domain[0] + ((y - range[0]) / (range[1] - range[0] || 1)) * (domain[1] - domain[0]);
  scale.domain = bounds => ((domain = bounds), scale);
  scale.range = bounds => ((range = bounds), scale);
  return scale;
}

function behaviour() {
  const made = () => {};
  for (const name of ['on', 'extent', 'tickFormat', 'scale', 'transform', 'ticks']) {
    made[name] = () => made;
  }
  return made;
}

const shims = {d3, axisLeft: behaviour, scaleLinear, zoom: behaviour, brushX: behaviour};
globalThis.viewer_shims = {...shims, zoomIdentity: {scale: () => ({translate: () => null})}};
const later = [];
globalThis.window = {requestAnimationFrame: action => later.push(action)};
console.log = () => {};

async function load(viewer) {
  const folder = mkdtempSync(join(tmpdir(), 'memory-viz-'));
  try {
    const module = join(folder, 'viewer.mjs');
    const source = readFileSync(viewer, 'utf8')
      .replace(/^import \* as (\w+) from "[^"]*";$/gm, 'const $1 = viewer_shims.$1;')
      .replace(/^import (\{[^}]*\}) from "[^"]*";$/gm, 'const $1 = viewer_shims;');
    writeFileSync(module, source);
    return await import(pathToFileURL(module));
  } finally {
    rmSync(folder, {recursive: true});
  }
}

const [viewer, html] = process.argv.slice(2);
const text = readFileSync(html, 'utf8');
const files = JSON.parse(/const local_files = (.*)$/m.exec(text)[1]);
const kind = /add_local_files\(local_files, '([^']*)'\)/.exec(text)[1];
const {add_local_files} = await load(viewer);
add_local_files(files, kind);
later.splice(0).forEach(action => action());

const body = roots.body;
const polygons = [...body.all('polygon')].filter(p => p.data !== undefined);
const drawn = {
  kind,
  devices: [...body.children.filter(e => e.tag === 'select')[2].children].map(o => o.content),
  allocations: polygons
    .filter(p => p.data.elem !== 'summarized')
    .map(p => ({size: p.data.size, offsets: p.data.offsets, points: p.attributes.points})),
  events: [],
};
const is_event = e => e.data !== undefined && e.listeners.mousedown !== undefined;
for (const line of [...body.all('pre')].filter(is_event)) {
  fire(line, 'mousedown');
  const shown = [...body.all('pre')].filter(e => !is_event(e)).map(e => e.content);
  const rects = [...body.all('rect')];
  drawn.events.push({
    line: line.content,
    shown: shown.join('\n'),
    segments: rects.filter(r => r.attributes.stroke === 'black').map(r => r.data.size),
    blocks: rects
      .filter(r => r.attributes.fill !== 'white' && r.data.requested_size !== undefined)
      .map(r => r.data.requested_size),
  });
}
process.stdout.write(JSON.stringify(drawn));
