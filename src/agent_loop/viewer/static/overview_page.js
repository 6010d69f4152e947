// Overview of the run: key figures, findings, metric curves and settings.

import { lineChart, forgetCharts } from "./chart.js";
import { curves } from "./curves.js";
import { digest } from "./digest.js";
import { debounced, h, replaceChildren } from "./dom.js";
import { compact, isNumber, number, seconds, share, signed } from "./format.js";
import { address, adjust } from "./router.js";
import { settings } from "./settings.js";

const STEPS_BACK = 10;
const STEPS_OF_ETA = 20;

const FIGURES = [
  { label: "Reward", name: "reward/mean", format: number },
  { label: "Success", name: "reward/success_share", format: share },
  { label: "Validation success", name: "val/reward/success_share", format: share },
  { label: "Turns and replies", name: "rollout/num_turns/mean", format: number },
  { label: "Response tokens", name: "rollout/response_length/mean", format: number },
  { label: "Tokens per second", name: "perf/model_tokens_per_s", format: compact },
  { label: "Seconds per step", name: "timing_s/step", format: seconds },
];

export function overviewPage(run, parameters) {
  const head = h("section.figures", { "aria-label": "Key figures" });
  const findings = h("section.digest", { "aria-label": "Findings" });
  const charts = h(".chart-sections");
  const config = h("section.settings-section", { "aria-label": "Settings" });
  const view = {
    smoothing: Number(parameters.get("smooth") ?? 0.6),
    wanted: parameters.get("metric") ?? "",
    isRestOpen: false,
  };

  const drawCharts = () => {
    forgetCharts();
    replaceChildren(charts, chartSections(run, view));
  };
  const drawAll = () => {
    replaceChildren(head, figures(run));
    drawCharts();
  };
  const drawTable = debounced(() => {
    replaceChildren(head, figures(run));
    replaceChildren(findings, digestOf(run));
  }, 100);
  const stop = run.onChange((what) => {
    if (what === "metrics") drawAll();
    if (what === "table") drawTable();
    if (what === "state" && !config.hasChildNodes() && run.config)
      replaceChildren(config, settings(run.config));
  });
  drawAll();
  replaceChildren(findings, digestOf(run));
  if (run.config) replaceChildren(config, settings(run.config));
  const search = h("input", {
    type: "search",
    placeholder: "Find a metric",
    "aria-label": "Find a metric",
    value: view.wanted,
    oninput: debounced((event) => {
      view.wanted = event.target.value;
      adjust({ metric: view.wanted });
      drawCharts();
    }),
  });
  return {
    element: h(
      ".page",
      {},
      h("h1.visually-hidden", {}, "Overview"),
      head,
      findings,
      h(".toolbar", {}, h("h2", {}, "Curves"), h(".spacer"), smoothingControl(view, drawCharts), search),
      charts,
      config,
    ),
    keys: [{ keys: ["/"], about: "find a metric", action: () => search.focus() }],
    update: () => true,
    leave: stop,
  };
}

function smoothingControl(view, redraw) {
  return h(
    "label.inline",
    {},
    "Smoothing ",
    h("input", {
      type: "range",
      min: "0",
      max: "0.98",
      step: "0.02",
      value: view.smoothing,
      oninput: debounced((event) => {
        view.smoothing = Number(event.target.value);
        adjust({ smooth: event.target.value });
        redraw();
      }, 30),
    }),
  );
}

function figures({ metrics, table, totalSteps }) {
  const shown = FIGURES.filter(({ name }) => metrics.series(name)).map((figure) => figureOf(figure, metrics));
  const remaining = remainingSeconds(metrics, totalSteps);
  const stored = table.length ? figure("Trajectories stored", compact(table.length), "") : null;
  if (!shown.length && !stored)
    return h("p.empty", {}, "No step is complete yet. This page updates automatically.");
  return [...shown, remaining ? figure("Time left", seconds(remaining), "") : null, stored];
}

function figureOf({ label, name, format }, metrics) {
  const [now, before] = [metrics.latest(name), metrics.latest(name, STEPS_BACK)];
  const change = isNumber(now) && isNumber(before) ? now - before : null;
  const isPercent = format === share;
  const note = change
    ? `${isPercent ? `${signed(Math.round(1000 * change) / 10)} points` : signed(change)} in ${STEPS_BACK} steps`
    : "";
  return figure(label, format(now), note);
}

function figure(label, value, note) {
  return h(".figure", {}, h(".label", {}, label), h(".value", {}, value), h(".note", {}, note));
}

function remainingSeconds(metrics, totalSteps) {
  const times = metrics.series("timing_s/step")?.values.slice(-STEPS_OF_ETA).filter(isNumber) ?? [];
  const left = totalSteps === null ? 0 : totalSteps - metrics.lastStep;
  return times.length && left > 0 ? (left * times.reduce((sum, time) => sum + time, 0)) / times.length : null;
}

function digestOf({ table }) {
  const splits = table.column("split")?.dictionary ?? [];
  const found = digest(table, splits.includes("train") ? "train" : splits[0]);
  if (!found) return null;
  const { step, split, count, findings, filter } = found;
  return [
    h(
      "h2",
      {},
      `Step ${step}`,
      h(
        "span.aside",
        {},
        h("a", { href: address("trajectories", filter) }, `${number(count)} trajectories`),
        " · ",
        h("a", { href: address("time", { split, step }) }, "time line of the step"),
      ),
    ),
    findings.length
      ? h("ul.findings", {}, findings)
      : h("p.muted", {}, "There are no failures and no incidents."),
  ];
}

function chartSections({ metrics }, view) {
  const { smoothing, wanted } = view;
  const matches = (chart) =>
    !wanted ||
    [chart.title, ...chart.series.map((one) => one.label)].some((text) =>
      text.toLowerCase().includes(wanted.toLowerCase()),
    );
  return curves(metrics).map(({ title, charts, isRest }) => {
    const found = charts.filter(matches);
    if (!found.length) return null;
    const drawn = () =>
      h(
        ".charts",
        {},
        found.map((chart) => lineChart(chart.series, { smoothing, ...chart })),
      );
    if (!isRest || wanted) return h("section", {}, h("h3", {}, title), drawn());
    const rest = h("details.more", {}, h("summary", {}, `${title} (${found.length})`));
    rest.addEventListener("toggle", () => {
      view.isRestOpen = rest.open;
      if (rest.open && rest.children.length === 1) rest.append(drawn());
    });
    rest.open = view.isRestOpen;
    return rest;
  });
}
