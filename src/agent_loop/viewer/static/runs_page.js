// All runs: a list, curves over each other, and the settings that differ.

import { addressOf, shortName } from "./collection.js";
import { h, replaceChildren } from "./dom.js";
import { isNumber, number } from "./format.js";
import { RunCurves } from "./run_curves.js";

const WORDS = { running: "running", finished: "finished", quiet: "no new data" };
const MOST_CHANGES = 3;

export function runsPage(collection, parameters) {
  const list = h(".wide", { tabindex: "0", role: "region", "aria-label": "Runs" });
  const settings = h("section.differences", { "aria-label": "Differences of the settings" });
  const curves = new RunCurves(collection, parameters);
  const draw = () => {
    if (!collection.isLoaded) return;
    replaceChildren(list, runTable(collection));
    replaceChildren(settings, differences(collection));
    curves.reload();
  };
  const stop = collection.onChange(draw);
  draw();
  return {
    element: h(".page", {}, h("h1.visually-hidden", {}, "Runs"), list, curves.element, settings),
    keys: [{ keys: ["/"], about: "find a metric", action: () => curves.search.focus() }],
    update: () => true,
    leave: stop,
  };
}

function runTable({ runs, groups }) {
  if (!runs.length) return h("p.empty", {}, "There are no runs. This page updates automatically.");
  const colors = new Map(groups.map((group) => [group.name, group.color]));
  const heads = ["group", "run", "state", "step", "reward", "held out", "seed", "model", "changed settings"];
  return h(
    "table.plain.runs",
    {},
    h("caption.visually-hidden", {}, "Runs"),
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, runs.map((run) => runRow(run, colors.get(run.group)))),
  );
}

function runRow(run, color) {
  const steps = run.total_steps ? `${number(run.step)} of ${number(run.total_steps)}` : number(run.step);
  return h(
    "tr",
    {},
    h("td", {}, run.group ? h(`b.c${color}`, {}, run.group) : h("span.muted", {}, "–")),
    h(
      "th.name",
      { scope: "row" },
      run.has_pages ? h("a", { href: addressOf(run.key) }, run.name) : run.name,
    ),
    h(
      "td",
      {},
      h("span.state", {}, h(`span.lamp.${run.status}`, { "aria-hidden": "true" }), WORDS[run.status]),
    ),
    h("td.number", {}, isNumber(run.step) ? steps : run.kind),
    h("td.number", {}, number(run.reward)),
    h("td.number", {}, number(run.held_out)),
    h("td.number", {}, run.seed ?? "–"),
    h("td.model", { title: run.model }, shortModel(run.model)),
    h("td", {}, changes(run.changed)),
  );
}

function changes(changed) {
  const names = Object.keys(changed);
  const more = names.slice(MOST_CHANGES);
  return [
    names.slice(0, MOST_CHANGES).map((name) => [
      h("span.pill", { title: `${name}: ${changed[name]}` }, `${shortName(name)}=${changed[name]}`),
      " ",
    ]),
    more.length > 0 &&
      h("span.muted", { title: more.map((name) => `${name}: ${changed[name]}`).join("\n") }, `+${more.length}`),
  ];
}

const shortModel = (model) => (model ? String(model).split("/").filter(Boolean).at(-1) : "–");

/** Returns a table with a row per setting that differs and a column per group of runs. */
function differences({ differing, groups }) {
  const names = Object.keys(differing);
  if (groups.flatMap((group) => group.runs).length < 2) return null;
  if (!names.length) return [h("h2", {}, "Settings"), h("p.muted", {}, "The settings of all runs are equal.")];
  return [
    h("h2", {}, "Settings that differ"),
    h(
      ".wide",
      { tabindex: "0", role: "region", "aria-label": "Settings that differ" },
      h(
        "table.plain",
        {},
        h("caption.visually-hidden", {}, "Settings that differ"),
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", { scope: "col" }, "setting"),
            groups.map((group) => h(`th.c${group.color}`, { scope: "col", title: group.label }, group.name)),
          ),
        ),
        h(
          "tbody",
          {},
          names.map((name) =>
            h(
              "tr",
              {},
              h("th", { scope: "row" }, h("code", {}, name)),
              groups.map((group) => h("td", {}, h("code", {}, valuesOf(differing[name], group.runs)))),
            ),
          ),
        ),
      ),
    ),
  ];
}

function valuesOf(values, runs) {
  return [...new Set(runs.map((run) => values[run.key] ?? "–"))].join(", ");
}
