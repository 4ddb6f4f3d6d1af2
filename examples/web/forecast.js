// The page: forecasts every half hour of series.json from rows.f32 and draws what came out.
// `?model=URL` takes another model than model.bin.

import { Colibri, ColibriError, fetchBytes, fnv1a } from "./colibri.js";

const DAY = 48; // half hours
const HALF_HOUR = 30 * 60 * 1000; // milliseconds
const COLOURS = 4; // experts that have a colour in style.css; later ones share them
const TIMED = { passes: 10, rounds: 50, milliseconds: 500 }; // a round is so many passes over the rows

const find = (id) => document.getElementById(id);
const show = (id, text) => (find(id).textContent = text);
const count = (number) => number.toLocaleString("en-GB");
const fixed = (number, digits) =>
  number.toLocaleString("en-GB", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const hex = (digest) => `0x${digest.toString(16).padStart(8, "0")}`;

let files; // engine, rows, series: what stays when another model is taken
let view; // what is drawn: the forecast, and which half hours of it are shown

async function main() {
  if (location.protocol === "file:") throw new Error("Browsers load modules from servers only: web.py --serve is one.");
  const [engine, rows, series] = await Promise.all(["engine.wasm", "rows.f32", "series.json"].map(fetchBytes));
  const json = JSON.parse(new TextDecoder().decode(series));
  files = { engine, rows: new Float32Array(rows.buffer), series: json };
  const url = new URLSearchParams(location.search).get("model") ?? "model.bin";
  const [model, expected] = await Promise.all([fetchBytes(url), fetchBytes("expected.json")]);
  files.expected = JSON.parse(new TextDecoder().decode(expected));
  await run(model);
}

/** Everything from a model's bytes to the page; throws ColibriError for what is not a model. */
async function run(bytes) {
  const { engine, rows, series, expected } = files;
  const model = await Colibri.open(engine, bytes);
  model.selftest();
  const halfHours = series.demand.length;
  if (model.inputSize * halfHours !== rows.length || model.outputSize !== 1) {
    throw new Error(`This model takes ${model.inputSize} numbers and gives ${model.outputSize}; the page has rows of ` +
      `${rows.length / halfHours} and wants one number. Export a model of this series.`); // prettier-ignore
  }
  const outputs = model.forward(rows);
  const experts = model.routes.length ? firstOf(model.routes[0], halfHours) : new Array(halfHours).fill(0);
  const forecast = Array.from(outputs, (y, n) => series.now[n] + series.change_scale * y);
  const days = view?.days ?? startDays();
  view = { forecast, experts, demand: series.demand, lanes: Math.max(1, model.experts), first: 0, days };

  show("error", `${fixed(meanError(forecast, series.demand), 3)} %`);
  const { seasonal_naive: week, last_weeks_change: change } = series.mape;
  show("error-note", `MAPE; last week’s value: ${fixed(week, 3)} %, now plus last week’s change: ${fixed(change, 3)} %`);
  show("engine-bytes", `${count(engine.length)} bytes`);
  show("engine-note", `version ${model.version}, every operation and format, uncompressed`);
  show("model-bytes", `${count(model.modelBytes)} bytes`);
  show("model-note", `${model.experts} experts, fetched as a file`);
  show("context-bytes", `${count(model.contextBytes)} bytes`);
  show("certificate", "passed");
  find("certificate").className = "good";
  const digest = fnv1a(outputs);
  const known = fnv1a(bytes) === expected.model;
  show("digest", hex(digest));
  show("expected", known ? hex(expected.outputs) : "not known");
  const equal = known && digest === expected.outputs;
  const share = `${count(halfHours)} forecasts`;
  show("verdict", equal ? `equal: ${share}, every bit` : known ? "different: please report this" : "another model");
  find("verdict").className = `note ${equal ? "good" : known ? "bad" : ""}`;
  drawLegend();
  find("alert").hidden = true;
  find("result").hidden = false;
  show("status", "");
  draw();
  await new Promise((resume) => setTimeout(resume, 50)); // paint first: measuring holds the page
  measure(model, rows, halfHours);
  document.body.dataset.state = "done";
}

/** Of choices (rows, tokens · k), best first, the best of each row. */
function firstOf(choices, rows) {
  const step = choices.length / rows;
  return Array.from({ length: rows }, (_, n) => choices[n * step]);
}

function measure(model, rows, halfHours) {
  const times = [];
  const begin = performance.now();
  while (times.length < TIMED.rounds && performance.now() - begin < TIMED.milliseconds) {
    const start = performance.now();
    for (let pass = 0; pass < TIMED.passes; ++pass) model.forward(rows);
    times.push((1000 * (performance.now() - start)) / (TIMED.passes * halfHours));
  }
  times.sort((a, b) => a - b);
  const median = times[times.length >> 1];
  // Browsers round their clock: to 0.1 ms, which the passes make up for, or to 100 ms against fingerprinting.
  show("latency", median > 0 ? `${fixed(median, 2)} µs` : "too short for this clock");
  const round = count(TIMED.passes * halfHours);
  show("latency-note", `median of ${times.length} rounds of ${round}, copying and noting the expert included`);
}

const meanError = (forecast, demand) =>
  (100 * forecast.reduce((sum, f, n) => sum + Math.abs(f - demand[n]) / demand[n], 0)) / demand.length;

function fail(error) {
  console.warn(error);
  find("result").hidden = true;
  show("status", "");
  show("alert-name", error instanceof ColibriError ? error.name : "");
  const text = error instanceof WebAssembly.CompileError
    ? `This browser cannot compile the engine; it needs WebAssembly with vectors (2023 or later). ${error.message}`
    : error.message; // prettier-ignore
  show("alert-text", text);
  find("alert").hidden = false;
  document.body.dataset.state = "failed";
}

// --- the chart ---------------------------------------------------------------------------------------------------

const startDays = () => (innerWidth < 640 ? 3 : 14);
const colour = (expert) => `expert-${expert % COLOURS}`;
const total = () => view.forecast.length;
const last = () => Math.min(view.first + view.days * DAY, total());
const time = (n, options) =>
  new Date(Date.parse(files.series.first_day) + n * HALF_HOUR).toLocaleString("en-GB", { timeZone: "UTC", ...options });
const GAP = { left: 50, right: 14, title: 28, between: 12, axis: 24 }; // pixels
const LANE = 16;

function element(name, attributes, parent, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

/** About `wanted` round numbers between `low` and `high`. */
function ticks(low, high, wanted) {
  const raw = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, n) => (first + n) * step);
}

/** A panel's vertical scale, with its title, grid and labels drawn. */
function panel(svg, width, top, height, title, values, wanted) {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const margin = 0.06 * (most - least) || 1;
  const [low, high] = [least - margin, most + margin];
  const y = (value) => top + height - ((value - low) / (high - low)) * height;
  element("text", { x: 0, y: top - 12, class: "title" }, svg, title);
  for (const mark of ticks(low, high, wanted)) {
    const at = Math.round(y(mark));
    element("line", { x1: GAP.left, x2: width - GAP.right, y1: at, y2: at, class: "grid" }, svg);
    element("text", { x: GAP.left - 6, y: at + 4, "text-anchor": "end" }, svg, count(mark).replace("-", "−"));
  }
  return y;
}

function draw() {
  const svg = find("chart");
  const width = svg.clientWidth;
  if (!view || width === 0) return;
  svg.replaceChildren();
  const { forecast, demand, experts, first } = view;
  const end = last();
  const span = end - first;
  const right = width - GAP.right;
  const x = (n) => GAP.left + ((n - first) / span) * (right - GAP.left);
  const shown = Array.from({ length: span }, (_, n) => first + n);
  const heights = { demand: width < 640 ? 200 : 280, lanes: LANE * view.lanes, error: width < 640 ? 80 : 100 };
  const top = { demand: GAP.title };
  top.lanes = top.demand + heights.demand + GAP.between + GAP.title;
  top.error = top.lanes + heights.lanes + GAP.between + GAP.title;
  const bottom = top.error + heights.error;
  svg.setAttribute("viewBox", `0 0 ${width} ${bottom + GAP.axis}`);
  svg.style.height = `${bottom + GAP.axis}px`;

  const gigawatts = shown.flatMap((n) => [forecast[n] / 1000, demand[n] / 1000]);
  const errors = shown.map((n) => forecast[n] - demand[n]);
  const yDemand = panel(svg, width, top.demand, heights.demand, "Demand, GW", gigawatts, 5);
  element("text", { x: 0, y: top.lanes - 12, class: "title" }, svg, "Expert that made the forecast");
  const yError = panel(svg, width, top.error, heights.error, "Error, MW (forecast − measured)", [...errors, 0], 4);
  for (let e = 0; e < view.lanes; ++e) {
    element("text", { x: GAP.left - 6, y: top.lanes + LANE * e + 12, "text-anchor": "end" }, svg, e);
  }

  drawDays(svg, x, bottom, Object.keys(top).map((name) => [top[name], top[name] + heights[name]]));
  element("line", { x1: GAP.left, x2: right, y1: yError(0), y2: yError(0), class: "axis" }, svg);
  // Values are drawn at the middle of their half hour.
  const path = shown.map((n, i) => `${i ? "L" : "M"}${x(n + 0.5).toFixed(1)} ${yDemand(demand[n] / 1000).toFixed(1)}`);
  element("path", { d: path.join(""), class: "measured" }, svg);
  const size = span > 7 * DAY ? 2.6 : span > 3 * DAY ? 3.4 : 4.2;
  for (let e = 0; e < view.lanes; ++e) {
    const mine = shown.filter((n) => experts[n] === e);
    const dots = (y) => mine.map((n) => `M${x(n + 0.5).toFixed(1)} ${y(n).toFixed(1)}h0`).join("");
    const points = (y, size) =>
      element("path", { d: dots(y), class: `dots ${colour(e)}`, "stroke-width": size }, svg);
    points((n) => yDemand(forecast[n] / 1000), size);
    points((n) => yError(errors[n - first]), 0.8 * size);
  }
  for (let n = first; n < end; ) {
    let next = n;
    while (next < end && experts[next] === experts[n]) ++next;
    element("rect", { x: x(n).toFixed(2), y: top.lanes + LANE * experts[n] + 2, width: (x(next) - x(n)).toFixed(2),
      height: LANE - 4, class: `lane ${colour(experts[n])}`, "data-expert": experts[n], "data-first": n,
      "data-count": next - n }, svg); // prettier-ignore
    n = next;
  }
  const cursor = element("line", { y1: top.demand, y2: bottom, class: "cursor", visibility: "hidden" }, svg);
  svg.onpointermove = (event) => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    const n = Math.floor(first + ((at - GAP.left) / (right - GAP.left)) * span);
    if (n >= first && n < end) point(cursor, n, x(n + 0.5));
  };
  svg.onpointerdown = svg.onpointermove;
  svg.onpointerleave = () => (cursor.setAttribute("visibility", "hidden"), hint());
  hint();
  drawControls();
}

/** Midnights as lines through each panel, and the names of the days. */
function drawDays(svg, x, bottom, panels) {
  const day = x(DAY) - x(0);
  const narrow = day < 46;
  const month = time(view.first, { month: "short" });
  element("text", { x: GAP.left - 6, y: bottom + 17, "text-anchor": "end" }, svg, month);
  const step = day < 24 ? 2 : 1;
  for (let n = Math.ceil(view.first / DAY) * DAY; n <= last(); n += DAY) {
    for (const [y1, y2] of panels) element("line", { x1: x(n), x2: x(n), y1, y2, class: "grid" }, svg);
    if (n + DAY > last() || (n / DAY) % step) continue;
    const options = narrow ? { day: "numeric" } : { weekday: "short", day: "numeric" };
    element("text", { x: x(n + DAY / 2), y: bottom + 17, "text-anchor": "middle" }, svg, time(n, options));
  }
}

function point(cursor, n, at) {
  for (const end of ["x1", "x2"]) cursor.setAttribute(end, at);
  cursor.setAttribute("visibility", "visible");
  const error = view.forecast[n] - view.demand[n];
  const when = time(n, { weekday: "short", day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
  const sign = error < 0 ? "−" : "+";
  show("readout", `${when}: forecast ${fixed(view.forecast[n] / 1000, 2)} GW, measured ` +
    `${fixed(view.demand[n] / 1000, 2)} GW, error ${sign}${count(Math.round(Math.abs(error)))} MW, expert ` +
    `${view.experts[n]}`); // prettier-ignore
}

function hint() {
  const options = { day: "numeric", month: "long" };
  const until = time(last() - 1, { ...options, year: "numeric" });
  show("readout", `${time(view.first, options)} to ${until}. Touch or point at the chart for values.`);
}

function drawLegend() {
  const legend = find("legend");
  legend.replaceChildren();
  const entry = (line, text) => {
    const item = document.createElement("li");
    element("path", line, element("svg", { viewBox: "0 0 22 12", "aria-hidden": "true" }, item));
    item.append(text);
    legend.append(item);
  };
  entry({ d: "M2 6H20", class: "measured" }, "measured");
  for (let e = 0; e < view.lanes; ++e) {
    const share = view.experts.filter((expert) => expert === e).length / total();
    entry({ d: "M4 6h0M11 6h0M18 6h0", class: `dots ${colour(e)}`, "stroke-width": 4.2 },
      `forecast, expert ${e} (${Math.round(100 * share)} %)`); // prettier-ignore
  }
}

function drawControls() {
  for (const button of document.querySelectorAll("[data-days]")) {
    button.setAttribute("aria-pressed", Number(button.dataset.days) === view.days);
  }
  find("earlier").disabled = view.first === 0;
  find("later").disabled = last() === total();
}

function move(days, steps) {
  const first = view.first + steps * days * DAY;
  view.days = days;
  view.first = Math.max(0, Math.min(first, total() - days * DAY));
  draw();
}

for (const button of document.querySelectorAll("[data-days]")) {
  button.onclick = () => move(Number(button.dataset.days), 0);
}
find("earlier").onclick = () => move(view.days, -1);
find("later").onclick = () => move(view.days, 1);
find("file").onchange = async (event) => {
  const [file] = event.target.files;
  if (!file) return;
  document.body.dataset.state = "loading";
  await file.arrayBuffer().then(run).catch(fail);
};
new ResizeObserver(draw).observe(find("chart"));
main().catch(fail);
