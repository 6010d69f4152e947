// Line chart of series over the steps. All charts of a page share a read-out under the pointer.

import { h, replaceChildren, svg } from "./dom.js";
import { isNumber } from "./format.js";

const WIDTH = 420;
const HEIGHT = 170;
const MARGIN = { left: 46, right: 10, top: 8, bottom: 20 };
const MOST_POINTS = 800;
const NUM_DASHES = 6;
const ANY = [-Infinity, Infinity];
const shared = { step: null, charts: new Set() };

/**
 * @param series  `[{label, steps, values, color, dash, isFaint, isBand}]`; colors and dashes are indices of the
 *   palette and of the dash patterns.
 * @param options  `{title, format, smoothing, isStacked, about, least, most, within}`. The axis contains `least` and
 *   `most`. Bands and the margins of the axis stay within the range `within` of the possible values.
 */
export function lineChart(series, options) {
  const chart = new LineChart(series, options);
  shared.charts.add(chart);
  return chart.element;
}

/** Removes the charts of a page that was left. */
export function forgetCharts() {
  shared.charts.clear();
}

class LineChart {
  constructor(series, options) {
    this.options = options;
    this.series = options.isStacked ? stacked(series) : series.map((one) => clamped(one, options.within));
    this.at = h("span.at");
    this.readout = h(".readout", { style: { "--item": `${longestLabel(this.series) + (series.some((one) => one.dash !== undefined) ? 14 : 9)}ch` } });
    this.cursor = svg("line.cursor", { y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
    this.scale = scaleOf(this.series, options);
    const summary = this.series
      .map((one) => `${one.label}: ${options.format(latest(one).value)}`)
      .join(", ");
    const drawing = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${options.title}; last ${summary}` },
      this.#grid(),
      this.#marks(),
      this.cursor,
    );
    drawing.addEventListener("pointermove", (event) => this.#point(event, drawing));
    drawing.addEventListener("pointerleave", () => showStep(null));
    this.element = h(
      "figure.chart",
      { title: options.about },
      h("figcaption", {}, h("span.chart-title", {}, options.title), this.at),
      this.readout,
      drawing,
    );
    this.show(null);
  }

  show(step) {
    const isShown = step !== null && step >= this.scale.first && step <= this.scale.last;
    this.cursor.setAttribute("visibility", isShown ? "visible" : "hidden");
    if (isShown) {
      this.cursor.setAttribute("x1", this.scale.x(step));
      this.cursor.setAttribute("x2", this.scale.x(step));
    }
    this.at.textContent = `step ${isShown ? step : this.scale.last}`;
    const named = this.series.filter((one) => !one.isBand).reverse();
    const items = (this.options.isStacked ? named : named.reverse()).map((one) =>
      this.#item(one, isShown ? { step, value: valueAt(one, step) } : latest(one)),
    );
    replaceChildren(this.readout, items);
  }

  /** Returns the value of a series. A value of an earlier step than the chart's last one names its step. */
  #item(one, { step, value }) {
    const isOld = step !== null && step !== shared.step && step !== this.scale.last;
    return h(
      `span.c${one.color}`,
      { title: one.label },
      one.dash !== undefined && strokeKey(one),
      this.series.length > 1 ? `${one.label} ` : "",
      h("b", {}, this.options.format(value)),
      isOld && h("span.at", {}, ` at ${step}`),
    );
  }

  #point(event, drawing) {
    const box = drawing.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * WIDTH;
    const share = (place - MARGIN.left) / (WIDTH - MARGIN.left - MARGIN.right);
    const step = this.scale.first + share * (this.scale.last - this.scale.first);
    showStep(nearest(this.series, step));
  }

  #grid() {
    const { y, x, ticks, stepTicks } = this.scale;
    return [
      ...ticks.map((tick) => [
        svg("line.grid", { x1: MARGIN.left, x2: WIDTH - MARGIN.right, y1: y(tick), y2: y(tick) }),
        svg(
          "text.tick",
          { x: MARGIN.left - 6, y: y(tick) + 3.5, "text-anchor": "end" },
          this.options.format(tick),
        ),
      ]),
      ...stepTicks.map((tick) =>
        svg("text.tick", { x: x(tick), y: HEIGHT - 5, "text-anchor": "middle" }, tick),
      ),
    ];
  }

  #marks() {
    return this.series.flatMap((one) => {
      if (one.isBand) return svg(`path.band.c${one.color}`, { d: areaPath(one, this.scale) });
      if (this.options.isStacked) return svg(`path.area.c${one.color}`, { d: areaPath(one, this.scale) });
      if (one.steps.length === 1 || one.isSparse) return [this.#line(one), ...dots(one, this.scale)];
      if (!this.options.smoothing) return this.#line(one);
      return [
        this.#line(one, "raw"),
        this.#line({ ...one, values: smoothed(one.values, this.options.smoothing) }),
      ];
    });
  }

  #line(one, kind = "line") {
    return svg(`path.${kind}.c${one.color}${dashOf(one)}`, { d: linePath(one, this.scale) });
  }
}

function dashOf({ dash }) {
  return dash ? `.dash-${dash % NUM_DASHES}` : "";
}

/** Returns a short piece of the line of a series. */
function strokeKey(one) {
  const line = svg(`line.line${dashOf(one)}`, { x1: 0, x2: 24, y1: 4, y2: 4 });
  return svg("svg.stroke-key", { viewBox: "0 0 24 8", "aria-hidden": "true" }, line);
}

function showStep(step) {
  if (step === shared.step) return;
  shared.step = step;
  for (const chart of shared.charts) chart.show(step);
}

/** Returns the exponential moving average, unbiased at the start. `weight` is the weight of previous values. */
export function smoothed(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (!isNumber(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

function scaleOf(series, { least, most, within, isStacked }) {
  const steps = series.flatMap((one) => [one.steps[0], one.steps.at(-1)]);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  let [low, high] = limits(series);
  if (least !== undefined) low = Math.min(low, least);
  if (most !== undefined) high = Math.max(high, most);
  if (isStacked) low = 0;
  if (high === low) [low, high] = aroundConstant(low, within ?? ANY);
  const span = Math.max(last - first, 1e-9);
  return {
    first,
    last,
    x: (step) =>
      MARGIN.left + (last === first ? 0.5 : (step - first) / span) * (WIDTH - MARGIN.left - MARGIN.right),
    y: (value) =>
      HEIGHT - MARGIN.bottom - ((value - low) / (high - low)) * (HEIGHT - MARGIN.top - MARGIN.bottom),
    ticks: niceTicks(low, high, 4),
    stepTicks: niceTicks(first, last, 5).filter(Number.isInteger),
  };
}

/** Returns a range around a constant value. The range contains the value, and no other values outside `within`. */
function aroundConstant(value, [least, most]) {
  const margin = Math.abs(value) * 0.1 || (most === 1 ? 0.05 : 0.5);
  const low = Math.max(value - margin, Math.min(value, least));
  return [low, Math.min(value + margin, Math.max(value, most))];
}

/** Returns a band with its ends within a range. Other series are returned unchanged. */
function clamped(one, within) {
  if (!one.isBand || !within) return one;
  const inside = (value) => (isNumber(value) ? Math.min(Math.max(value, within[0]), within[1]) : value);
  return { ...one, values: one.values.map(inside), floor: one.floor.map(inside) };
}

function limits(series) {
  let low = Infinity;
  let high = -Infinity;
  for (const { values, floor } of series) {
    for (const value of floor ? [...values, ...floor] : values) {
      if (!isNumber(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low > high ? [0, 1] : [low, high];
}

export function niceTicks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const ticks = [];
  for (let tick = Math.ceil(low / size - 1e-9) * size; tick <= high + size * 1e-6; tick += size) {
    ticks.push(Number(tick.toPrecision(10)));
  }
  return ticks;
}

function linePath({ steps, values }, { x, y }) {
  const parts = [];
  let isUp = true;
  for (const index of thinned(values)) {
    if (!isNumber(values[index])) {
      isUp = true;
      continue;
    }
    parts.push(`${isUp ? "M" : "L"}${x(steps[index]).toFixed(1)} ${y(values[index]).toFixed(1)}`);
    isUp = false;
  }
  return parts.join("");
}

function areaPath({ steps, values, floor }, { x, y }) {
  const places = thinned(values).filter((index) => isNumber(values[index]) && isNumber(floor[index]));
  const upper = places.map((index) => `${x(steps[index]).toFixed(1)} ${y(values[index]).toFixed(1)}`);
  const lower = places
    .reverse()
    .map((index) => `${x(steps[index]).toFixed(1)} ${y(floor[index]).toFixed(1)}`);
  return upper.length ? `M${[...upper, ...lower].join("L")}Z` : "";
}

/** Returns the indices to draw: of many values, the lowest and the highest of each bin. */
function thinned(values) {
  if (values.length <= MOST_POINTS) return [...values.keys()];
  const size = (2 * values.length) / MOST_POINTS;
  const kept = [];
  for (let start = 0; start < values.length; start += size) {
    const end = Math.min(values.length, Math.floor(start + size));
    let low = Math.floor(start);
    let high = low;
    for (let index = low; index < end; index++) {
      if (values[index] < values[low]) low = index;
      if (values[index] > values[high]) high = index;
    }
    kept.push(...(low === high ? [low] : [Math.min(low, high), Math.max(low, high)]));
  }
  return kept;
}

function dots(one, { x, y }) {
  return one.steps
    .map((step, index) => [step, one.values[index]])
    .filter(([, value]) => isNumber(value))
    .map(([step, value]) => svg(`circle.dot.c${one.color}`, { cx: x(step), cy: y(value), r: 2.6 }));
}

function stacked(series) {
  const steps = [...new Set(series.flatMap((one) => one.steps))].sort((one, other) => one - other);
  const places = new Map(steps.map((step, index) => [step, index]));
  let floor = steps.map(() => 0);
  return series.map((one) => {
    const own = steps.map(() => null);
    one.steps.forEach((step, index) => (own[places.get(step)] = one.values[index]));
    const values = floor.map((below, index) => below + (own[index] ?? 0));
    const layer = { ...one, steps, values, floor, own };
    floor = values;
    return layer;
  });
}

function valueAt(one, step) {
  const index = one.steps.indexOf(step);
  return index < 0 ? null : (one.own ?? one.values)[index];
}

/** Returns the last value of a series, and its step; nulls without a value. */
function latest(one) {
  const values = one.own ?? one.values;
  const index = values.findLastIndex(isNumber);
  return index < 0 ? { step: null, value: null } : { step: one.steps[index], value: values[index] };
}

function longestLabel(series) {
  return series.length > 1 ? Math.max(...series.map(({ label }) => label.length)) : 0;
}

function nearest(series, step) {
  let best = null;
  for (const { steps } of series) {
    for (const candidate of steps)
      if (best === null || Math.abs(candidate - step) < Math.abs(best - step)) best = candidate;
  }
  return best;
}
