// One prompt: the rewards of its trajectories over the steps of each run.

import { lineChart } from "./chart.js";
import { addressOf } from "./collection.js";
import { h, replaceChildren } from "./dom.js";
import { headOf } from "./evaluations_page.js";
import { isNumber, number, plural, share } from "./format.js";
import { indexRuns, whenLoaded } from "./prompts_page.js";
import { address } from "./router.js";

export function promptPage(collection, parameters) {
  const digest = parameters.get("digest") ?? "";
  const body = h("div", {}, h("p.muted", {}, "Loading…"));
  const load = async () => {
    let found = await collection.prompt(digest);
    if (Object.keys(found.runs).length < collection.runs.length) {
      await indexRuns(collection, () => {});
      found = await collection.prompt(digest);
    }
    replaceChildren(
      body,
      found.prompt === null
        ? h("p.empty", {}, "No stored trajectory has this prompt.")
        : drawn(collection, found),
    );
  };
  whenLoaded(collection, () => load().catch((error) => (body.textContent = error.message)));
  return {
    element: h(".page", {}, h(".toolbar", {}, h("h1", {}, "Prompt")), body),
    update: (given) => given.get("digest") === digest,
  };
}

function drawn(collection, { prompt, runs }) {
  const shown = collection.runs.filter((run) => runs[run.key]);
  const groups = new Map(collection.groups.map((group) => [group.name, group.color]));
  const colors = new Map(shown.map((run, place) => [run, groups.get(run.group) ?? groups.size + place]));
  const byStep = new Map(shown.map((run) => [run.key, stepsOf(runs[run.key])]));
  const series = (value) =>
    shown.map((run) => ({ label: labelOf(run, shown), color: colors.get(run), ...value(byStep.get(run.key)) }));
  return [
    h(".prompt-text", {}, prompt),
    h(
      ".charts",
      {},
      lineChart(series((steps) => meansOf(steps, (one) => one.reward)), {
        title: "Mean reward of the prompt",
        format: number,
      }),
      lineChart(series((steps) => meansOf(steps, (one) => (one.is_success ? 1 : 0))), {
        title: "Successes of the prompt",
        format: share,
        least: 0,
        most: 1,
        within: [0, 1],
      }),
    ),
    shown.map((run) => trajectories(run, byStep.get(run.key), colors.get(run))),
  ];
}

const labelOf = (run, shown) =>
  run.group === null
    ? run.name
    : shown.filter((other) => other.group === run.group).length > 1 ? `${run.group} ${run.seed ?? run.name}` : run.group;

/** Returns the trajectories by split and step: `[{split, step, samples}]`. */
function stepsOf(samples) {
  const steps = new Map();
  for (const one of samples) {
    const name = `${one.split} ${one.step}`;
    if (!steps.has(name)) steps.set(name, { split: one.split, step: one.step, samples: [] });
    steps.get(name).samples.push(one);
  }
  return [...steps.values()].sort((a, b) => a.step - b.step);
}

/** Returns the means over the trajectories of each step. Steps without a value are left out. */
function meansOf(steps, value) {
  const found = new Map();
  for (const { step, samples } of steps)
    for (const one of samples)
      if (isNumber(value(one))) found.set(step, [...(found.get(step) ?? []), value(one)]);
  const values = [...found.values()].map((all) => all.reduce((sum, one) => sum + one, 0) / all.length);
  return { steps: [...found.keys()], values, isSparse: true };
}

function trajectories(run, steps, color) {
  const count = steps.reduce((sum, { samples }) => sum + samples.length, 0);
  const link = (one) =>
    h(
      `a.pill${one.is_success ? ".good" : ""}`,
      {
        href: addressOf(run.key) + address("trajectory", { split: one.split, step: one.step, id: one.trajectory_id }),
        title: `${one.trajectory_id}: ${one.stop_reason}`,
      },
      number(one.reward),
    );
  return h(
    "section.prompt-run",
    { "aria-label": run.name },
    h("h2", {}, h(`b.c${color}`, {}, run.group ?? ""), ` ${run.name}`, h("span.aside", {}, plural(count, "trajectory", "trajectories"))),
    h(
      "table.plain",
      {},
      h("caption.visually-hidden", {}, `Trajectories of ${run.name}`),
      headOf(["step", "split", "rewards"]),
      h(
        "tbody",
        {},
        steps.map(({ split, step, samples }) =>
          h(
            "tr",
            {},
            h("th", { scope: "row" }, number(step)),
            h("td", {}, split),
            h("td", {}, h(".samples", {}, samples.map(link))),
          ),
        ),
      ),
    ),
  );
}
