// Curves of metrics of several runs over each other, with bands over the runs that differ in their seeds alone.

import { forgetCharts, lineChart } from "./chart.js";
import { debounced, h, replaceChildren } from "./dom.js";
import { estimateText } from "./estimates.js";
import { number, labelOf } from "./format.js";
import { formatOf, rangeOf } from "./metric_scale.js";
import { adjust } from "./router.js";

const FIRST = [
  "reward/mean",
  "val/reward/mean",
  "reward/success_share",
  "val/reward/success_share",
  "rollout/response_length/mean",
  "actor/entropy",
];
const MOST_CHARTS = 12;
const BANDS = { range: "range over seeds", interval: "95 % interval of the mean", runs: "each run" };

export class RunCurves {
  #collection;
  #names = [];
  #curves = {};
  #hidden;
  #load = 0;

  constructor(collection, parameters) {
    this.#collection = collection;
    this.wanted = parameters.get("metric") ?? "";
    this.band = BANDS[parameters.get("band")] ? parameters.get("band") : "range";
    this.#hidden = new Set((parameters.get("hide") ?? "").split(",").filter(Boolean));
    this.legend = h(".chips", { role: "group", "aria-label": "Groups of runs" });
    this.note = h("p.muted", {}, "Loading…");
    this.charts = h(".charts");
    this.means = h("table.plain");
    this.lastValues = h(
      "details.more",
      { open: parameters.get("last") === "open", ontoggle: (event) => this.#keepOpen(event.target) },
      h("summary", {}, "Last values, with 95 % intervals over seeds"),
      this.means,
    );
    this.search = h("input", {
      type: "search",
      placeholder: "Find a metric",
      "aria-label": "Find a metric",
      value: this.wanted,
      oninput: debounced((event) => {
        this.wanted = event.target.value;
        adjust({ metric: this.wanted });
        this.reload();
      }),
    });
    this.element = h(
      "section",
      { "aria-label": "Curves" },
      h(".toolbar", {}, h("h2", {}, "Curves"), h(".spacer"), this.#bandChoice(), this.search),
      this.legend,
      this.note,
      this.charts,
      h(".wide", { tabindex: "0", role: "region", "aria-label": "Last values" }, this.lastValues),
    );
  }

  #keepOpen({ open, isConnected }) {
    if (isConnected) adjust({ last: open ? "open" : null });
  }

  /** Loads the curves of the wanted metrics and draws them. */
  async reload() {
    const load = ++this.#load;
    try {
      const names = await this.#collection.metricNames();
      const found = this.#matching(names);
      const shown = found.slice(0, MOST_CHARTS);
      const curves = shown.length ? await this.#collection.curves(shown) : {};
      if (load !== this.#load) return;
      [this.#names, this.#curves] = [shown, curves];
      const more = found.length - shown.length;
      this.note.textContent = !names.length
        ? "No run has metrics yet."
        : more > 0
          ? `The first ${MOST_CHARTS} of ${found.length} metrics are shown; enter more of the name.`
          : shown.length
            ? ""
            : "No metric has this name.";
      this.#draw();
    } catch (error) {
      if (load === this.#load) this.note.textContent = error.message;
    }
  }

  #matching(names) {
    const wanted = this.wanted.toLowerCase();
    if (wanted) return names.filter((name) => name.toLowerCase().includes(wanted));
    const found = FIRST.filter((name) => names.includes(name));
    return found.length ? found : names.slice(0, FIRST.length);
  }

  #draw() {
    forgetCharts();
    const { groups } = this.#collection;
    replaceChildren(this.legend, groups.map((group) => this.#chip(group)));
    const shown = groups.filter((group) => !this.#hidden.has(group.name));
    replaceChildren(
      this.charts,
      this.#names.map((name) => {
        const series = shown.flatMap((group) => this.#seriesOf(group, this.#curves[name]));
        const options = { title: labelOf(name), format: formatOf(name), within: rangeOf(name) };
        return series.length ? lineChart(series, options) : null;
      }),
    );
    const means = this.#meansTable(shown);
    replaceChildren(this.means, means);
    this.lastValues.hidden = means === null;
  }

  #seriesOf({ name, color, runs }, curves) {
    const mean = curves.groups[name];
    if (this.band === "runs" || !mean) {
      const lines = runs.map((run, dash) => ({ run, dash: runs.length > 1 ? dash : undefined }));
      return lines
        .filter(({ run }) => curves.runs[run.key])
        .map(({ run, dash }) => {
          const [steps, values] = curves.runs[run.key];
          return { label: run.name, steps, values, color, dash };
        });
    }
    const line = { label: name, steps: mean.steps, values: mean.mean, color };
    if (mean.num_runs < 2) return [line];
    const [floor, values] = this.band === "range" ? [mean.min, mean.max] : [mean.low, mean.high];
    return [{ label: `${name} to`, steps: mean.steps, values, floor, color, isBand: true }, line];
  }

  /** Returns the parts of the table of last values; null without values. */
  #meansTable(groups) {
    const rows = this.#names.flatMap((name) =>
      groups.filter((group) => this.#curves[name].groups[group.name]).map((group) => [name, group]),
    );
    if (!rows.length) return null;
    const heads = ["metric", "group", "runs", "last step", "last value", "mean of the last steps"];
    return [
      h("caption.visually-hidden", {}, "Last values"),
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
      h(
        "tbody",
        {},
        rows.map(([name, group]) => {
          const mean = this.#curves[name].groups[group.name];
          const format = formatOf(name);
          return h(
            "tr",
            {},
            h("th", { scope: "row" }, h("code", {}, name)),
            h("td", {}, h(`b.c${group.color}`, {}, group.name)),
            h("td.number", {}, mean.num_runs),
            h("td.number", {}, number(mean.steps.at(-1))),
            h("td.number", {}, estimateText(mean.last, format)),
            h("td.number", {}, `${estimateText(mean.recent, format)} of ${mean.num_recent}`),
          );
        }),
      ),
    ];
  }

  #chip(group) {
    const isShown = !this.#hidden.has(group.name);
    const toggle = () => {
      if (isShown) this.#hidden.add(group.name);
      else this.#hidden.delete(group.name);
      adjust({ hide: [...this.#hidden].join(",") });
      this.#draw();
    };
    return h(
      "button.chip",
      { "aria-pressed": String(isShown), onclick: toggle, title: group.runs.map((run) => run.name).join(", ") },
      h(`b.c${group.color}`, {}, group.name),
      ` ${group.label}${group.runs.length > 1 ? ` · ${group.runs.length} runs` : ""}`,
    );
  }

  #bandChoice() {
    const change = (event) => {
      this.band = event.target.value;
      adjust({ band: this.band });
      this.#draw();
    };
    return h(
      "label.inline",
      {},
      "Band ",
      h(
        "select",
        { onchange: change },
        Object.entries(BANDS).map(([value, label]) => h("option", { value, selected: value === this.band }, label)),
      ),
    );
  }
}
