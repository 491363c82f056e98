// Unpacks what `columns.py` packs: a zlib stream of a JSON header and planes of bytes.

async function unpack(name) {
  const element = document.getElementById(`table-${name}`);
  if (!element) return null;
  const text = atob(element.textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  element.remove();
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const body = new Uint8Array(await new Response(stream).arrayBuffer());
  const length = new DataView(body.buffer).getUint32(0, true);
  const table = JSON.parse(new TextDecoder().decode(body.subarray(4, 4 + length)));
  let at = 4 + length;
  const columns = {};
  for (const [column, count, width, growing] of table.columns) {
    columns[column] = joined(body, at, count, width, growing);
    at += count * width;
  }
  return { ...table, columns };
}

// Planes of bytes to numbers: zigzag undone, differences summed up.
function joined(body, at, count, width, growing) {
  const values = new Float64Array(count);
  let sum = 0;
  for (let row = 0; row < count; row++) {
    let value = 0;
    for (let plane = width - 1; plane >= 0; plane--) value = value * 256 + body[at + plane * count + row];
    value = value % 2 ? -(value + 1) / 2 : value / 2;
    values[row] = growing ? (sum += value) : value;
  }
  return values;
}

function size(bytes) {
  const units = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
  for (const [name, unit] of units) {
    if (bytes >= unit) return `${(bytes / unit).toFixed(unit >= 2 ** 30 ? 2 : bytes < 10 * unit ? 1 : 0)} ${name}`;
  }
  return `${bytes} B`;
}
