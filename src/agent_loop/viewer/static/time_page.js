// Time line of one or several steps: spans of each trajectory, the last trajectory to end, and the load of the servers.

import { describeEnd } from "./straggler.js";
import { h, replaceChildren } from "./dom.js";
import { number, seconds } from "./format.js";
import { newestStep } from "./digest.js";
import { serverLoad } from "./server_load.js";
import { address, adjust, go } from "./router.js";
import { kindLegend, secondsByKind, spanBar, WHOLE, withPrefill } from "./spans.js";
import { TimeAxis } from "./time_axis.js";
import { VirtualRows } from "./virtual_rows.js";

const ROW_HEIGHT = 20;
const WINDOWS = [1, 3, 10];
const ORDERS = {
  end: { label: "latest end first", key: (entry) => -entry.end },
  start: { label: "earliest start first", key: (entry) => entry.begin },
  long: { label: "longest first", key: (entry) => -entry.seconds },
};

export function timePage(run, parameters) {
  return new TimePage(run, parameters);
}

class TimePage {
  #run;
  #parameters;
  #entries = [];
  #loaded = "";
  #cache = new Map();
  #stop;
  #current = 0;
  #zoom = null;

  constructor(run, parameters) {
    this.#run = run;
    this.#parameters = parameters;
    this.controls = h(".toolbar");
    this.verdict = h("p.summary", { role: "status" });
    this.axis = new TimeAxis((range) => this.#setZoom(range));
    this.load = h("section.server-load", { "aria-label": "Servers" });
    this.legend = h(".legend-place");
    this.rows = new VirtualRows({
      render: (place) => this.#rowOf(place),
      rowHeight: ROW_HEIGHT,
      label: "Trajectories in time",
      role: "region",
    });
    this.rows.element.classList.add("gantt");
    this.element = h(
      ".page.fills",
      {},
      h("h1.visually-hidden", {}, "Time"),
      this.controls,
      this.verdict,
      this.legend,
      this.axis.element,
      this.rows.element,
      this.load,
    );
    this.keys = [
      { keys: ["]", "ArrowRight"], about: "next step", action: () => this.#turn(1) },
      { keys: ["[", "ArrowLeft"], about: "previous step", action: () => this.#turn(-1) },
      { keys: ["ArrowDown", "j"], about: "next trajectory", action: () => this.#move(1) },
      { keys: ["ArrowUp", "k"], about: "previous trajectory", action: () => this.#move(-1) },
      { keys: ["Enter", "o"], about: "open the trajectory", action: () => this.#open() },
      { keys: ["+", "="], about: "closer", action: () => this.#scale(0.5) },
      { keys: ["-"], about: "farther", action: () => this.#scale(2) },
      { keys: ["0"], about: "whole range", action: () => this.#setZoom(null) },
    ];
    this.#stop = run.onChange((what) => what === "table" && this.#show());
    this.#show();
  }

  update(parameters) {
    this.#parameters = parameters;
    this.#zoom = null;
    this.#show();
    return true;
  }

  leave() {
    this.#stop();
  }

  get #place() {
    const { table } = this.#run;
    const splits = table.column("split")?.dictionary ?? [];
    const split = this.#parameters.get("split") ?? (splits.includes("train") ? "train" : splits[0]);
    const wanted = this.#parameters.get("step");
    const step = wanted === null ? newestStep(table, split) : Number(wanted);
    return {
      split,
      step,
      window: Number(this.#parameters.get("window") ?? 1),
      order: this.#parameters.get("order") ?? "end",
    };
  }

  async #show() {
    const { split, step, window, order } = this.#place;
    if (!this.#run.table.has("split") || split === undefined || step === null) {
      replaceChildren(this.verdict, this.#run.isComplete ? "No trajectories are stored." : "Loading…");
      return;
    }
    const steps = stepsOf(this.#run.table, split);
    const last = steps.indexOf(step);
    const wanted = last < 0 ? [step] : steps.slice(Math.max(0, last - window + 1), last + 1);
    this.#drawControls(split, step, window, order, steps);
    const key = JSON.stringify([split, wanted, order]);
    if (key === this.#loaded) return;
    this.#loaded = key;
    try {
      const parts = [];
      for (const one of wanted) parts.push(...(await this.#timeline(split, one)));
      if (key === this.#loaded) this.#take(parts, order, wanted);
    } catch (error) {
      this.#take([], order, wanted);
      replaceChildren(this.verdict, error.message);
    }
  }

  async #timeline(split, step) {
    const key = `${split} ${step}`;
    if (!this.#cache.has(key)) this.#cache.set(key, await this.#run.source.timeline({ split, step }));
    return this.#cache.get(key).map((entry) => ({ ...entry, split, step }));
  }

  #take(parts, order, steps) {
    const origin = Math.min(...parts.map((entry) => entry.began_at));
    this.#entries = parts
      .map((entry) => entryOf(entry, origin))
      .sort((one, other) => ORDERS[order].key(one) - ORDERS[order].key(other));
    this.#current = 0;
    const kinds = new Set(this.#entries.flatMap(({ spans }) => spans.map(({ kind }) => kind)));
    replaceChildren(this.legend, kindLegend(kinds));
    replaceChildren(
      this.verdict,
      describeEnd(this.#entries, steps, (entry) => this.#link(entry)),
    );
    this.#setZoom(this.#zoom);
  }

  get #whole() {
    return { from: 0, to: Math.max(1e-6, ...this.#entries.map(({ end }) => end)) };
  }

  get #range() {
    return this.#zoom ?? this.#whole;
  }

  #setZoom(range) {
    const { from, to } = this.#whole;
    this.#zoom = range && { from: Math.max(from, range.from), to: Math.min(to, range.to) };
    this.axis.draw(this.#range, this.#zoom !== null);
    const inSight = this.#zoom
      ? this.#entries.filter((entry) => entry.end > this.#zoom.from && entry.begin < this.#zoom.to)
      : this.#entries;
    this.shownEntries = inSight;
    this.rows.reset(inSight.length);
    replaceChildren(this.load, this.#entries.length > 0 && serverLoad(this.#entries, this.#range));
  }

  #scale(factor) {
    const { from, to } = this.#range;
    const half = ((to - from) * factor) / 2;
    const middle = (from + to) / 2;
    this.#setZoom(half * 2 >= this.#whole.to ? null : { from: middle - half, to: middle + half });
  }

  #rowOf(place) {
    const entry = this.shownEntries[place];
    const { from, to } = this.#range;
    const tone = entry.is_success === null ? "plain" : entry.is_success ? "good" : "bad";
    const row = h(
      ".row.gantt-row",
      {},
      h(
        `a.gantt-name.${tone}`,
        {
          href: this.#link(entry),
          title: `${entry.trajectory_id}: ${seconds(entry.seconds)}, reward ${number(entry.reward)}, ${entry.stop_reason}`,
        },
        entry.trajectory_id,
      ),
      h(
        ".gantt-line",
        {},
        spanBar({ kind: WHOLE, name: "", start: entry.begin, end: entry.end, details: {} }, { from, to }),
        entry.spans.map((span) => spanBar(span, { from, to })),
      ),
    );
    row.querySelector(".gantt-line").addEventListener("click", () => go(this.#link(entry)));
    if (place === this.#current) row.classList.add("current");
    return row;
  }

  #link({ split, step, trajectory_id: id }) {
    return address("trajectory", { split, step, id });
  }

  #drawControls(split, step, window, order, steps) {
    const splits = this.#run.table.column("split").dictionary;
    const place = steps.indexOf(step);
    const select = (label, values, value, change) =>
      h(
        "label.inline",
        {},
        `${label} `,
        h(
          "select",
          { onchange: (event) => change(event.target.value) },
          values.map(([one, text]) =>
            h("option", { value: one, selected: String(one) === String(value) }, text),
          ),
        ),
      );
    if (
      document.activeElement &&
      this.controls.contains(document.activeElement) &&
      this.controls.dataset.place === `${split} ${steps.length}`
    )
      return;
    this.controls.dataset.place = `${split} ${steps.length}`;
    replaceChildren(
      this.controls,
      select(
        "Split",
        splits.map((one) => [one, one]),
        split,
        (value) => adjust({ split: value, step: null }),
      ),
      select(
        "Step",
        steps.map((one) => [one, one]),
        step,
        (value) => adjust({ step: value }),
      ),
      h("button", { disabled: place <= 0, onclick: () => this.#turn(-1), "aria-label": "Previous step" }, "‹"),
      h(
        "button",
        {
          disabled: place < 0 || place >= steps.length - 1,
          onclick: () => this.#turn(1),
          "aria-label": "Next step",
        },
        "›",
      ),
      select(
        "Together with",
        WINDOWS.map((one) => [one, one === 1 ? "none" : `the ${one - 1} before`]),
        window,
        (value) => adjust({ window: value === "1" ? null : value }),
      ),
      select(
        "Order",
        Object.entries(ORDERS).map(([name, { label }]) => [name, label]),
        order,
        (value) => adjust({ order: value === "end" ? null : value }),
      ),
    );
  }

  #turn(by) {
    const { split, step } = this.#place;
    const steps = stepsOf(this.#run.table, split);
    const next = steps[steps.indexOf(step) + by];
    document.activeElement?.blur();
    if (next !== undefined) adjust({ step: String(next), split });
  }

  #move(by) {
    const before = this.rows.elementOf(this.#current);
    this.#current = Math.min(Math.max(0, this.#current + by), this.shownEntries.length - 1);
    before?.classList.remove("current");
    this.rows.reveal(this.#current);
    this.rows.elementOf(this.#current)?.classList.add("current");
  }

  #open() {
    const entry = this.shownEntries?.[this.#current];
    if (entry) go(this.#link(entry));
  }
}

function stepsOf(table, split) {
  const code = table.column("split").dictionary.indexOf(split);
  const [splits, steps] = [table.column("split").values, table.column("step").values];
  const there = new Set();
  for (let row = 0; row < table.length; row++) if (splits[row] === code) there.add(steps[row]);
  return [...there].sort((one, other) => one - other);
}

/** Returns an entry with times in seconds since the first trajectory was requested. */
function entryOf(entry, origin) {
  const begin = entry.began_at - origin;
  const spans = withPrefill(
    entry.spans.map(([kind, name, start, end, details]) => ({
      kind,
      name,
      start: begin + start,
      end: begin + end,
      details,
    })),
  );
  const last = Math.max(entry.seconds ?? 0, 0, ...entry.spans.map((span) => span[3]));
  return { ...entry, begin, end: begin + last, seconds: last, spans, sums: secondsByKind(spans) };
}
