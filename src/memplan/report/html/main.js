// Paints the overview first, then what takes longer to unpack.

async function main() {
  const job = await unpack("overview");
  if (!job || !job.events) return;
  const view = new View(job.events);
  view.peak = job.peak;
  const timeline = new Timeline(view, job);
  timeline.addLevel(0, job.columns);
  legend(job);
  view.drawNow();
  document.documentElement.dataset.painted = "overview";
  performance.mark("painted");
  const levels = await unpack("levels");
  job.widths.slice(1).forEach((_, number) => timeline.addLevel(number + 1, levels.columns));
  const tables = { planned: await unpack("planned"), blocks: await unpack("blocks") };
  const height = Math.max(...Object.values(tables).map((table) => table?.height ?? 0));
  for (const [name, table] of Object.entries(tables)) {
    if (table) new BlockMap(view, `${name}-map`, job, { ...table, height });
  }
  const step = await unpack("step");
  const views = step ? [view, new Streams(step).view] : [view];
  const drawAll = () => views.forEach((one) => one.drawNow());
  drawAll();
  performance.mark("painted");
  document.documentElement.dataset.painted = "all";
  const again = () => {
    colours = {};
    drawAll();
  };
  for (const query of ["print", "(prefers-color-scheme: dark)"]) matchMedia(query).addEventListener("change", again);
}

function legend(job) {
  const list = document.getElementById("legend");
  const used = job.bands.filter((_, band) => job.columns[`0.band${band}`].some((value) => value > 0));
  for (const [name, words] of [...used.map((band) => [band, band.replace("_", " ")]), ["fragmentation", "reserved, unused"]]) {
    const item = list.appendChild(document.createElement("li"));
    item.appendChild(document.createElement("span")).className = `swatch fill ${name}`;
    item.append(words);
  }
}

document.addEventListener("click", async (e) => {
  const button = e.target.closest?.("button.copy");
  if (!button) return;
  try {
    await navigator.clipboard.writeText(button.dataset.text);
    button.textContent = "copied";
  } catch {
    getSelection().selectAllChildren(button.previousElementSibling);
    button.textContent = "selected";
  }
});

main();
