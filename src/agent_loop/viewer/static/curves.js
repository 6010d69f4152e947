// The sections and charts of the metrics. A metric that is in no section gets its own chart at the end.

import { number, seconds, share, labelOf } from "./format.js";
import { formatOf, rangeOf } from "./metric_scale.js";

const one = (name, label) => ({ name, label });

const SECTIONS = [
  {
    title: "Reward",
    charts: [
      {
        title: "Reward",
        lines: [one("reward/mean", "train"), one("val/reward/mean", "val")],
        band: ["reward/min", "reward/max"],
        about: "Mean over a step's trajectories; the band is from the lowest to the highest",
      },
      {
        title: "Success",
        lines: [one("reward/success_share", "train"), one("val/reward/success_share", "val")],
        format: share,
        least: 0,
        most: 1,
        about: "Share of all trajectories that reach the threshold",
      },
      {
        title: "Groups with signal",
        lines: [one("reward/signal_share", "signal")],
        format: share,
        least: 0,
        most: 1,
      },
      {
        title: "Advantage",
        lines: [one("reward/advantage_mean", "mean"), one("reward/advantage_std", "deviation")],
      },
    ],
  },
  {
    title: "Rollout",
    charts: [
      {
        title: "Turns and replies",
        lines: [
          one("rollout/num_turns/mean", "turns and replies"),
          one("rollout/num_tool_calls/mean", "tool calls"),
        ],
        about: "Prompt, turns of the model and replies, each counted once",
      },
      {
        title: "Response length",
        lines: [one("rollout/response_length/mean", "mean"), one("rollout/response_length/max", "longest")],
        about: "Tokens",
      },
      { title: "Stop reasons", prefix: "rollout/stop_reason/", isStacked: true, format: share, most: 1 },
      { title: "Incidents per trajectory", prefix: "rollout/incidents/" },
      {
        title: "Malformed tool calls",
        lines: [one("rollout/malformed_call_share", "calls"), one("rollout/invalid_turn_share", "turns")],
        format: share,
        least: 0,
      },
      { title: "Not scored", lines: [one("rollout/unscored_share", "share")], format: share, least: 0 },
    ],
  },
  {
    title: "Learning",
    charts: [
      { title: "Loss", lines: [one("actor/loss", "actor"), one("critic/loss", "critic")] },
      { title: "Entropy", lines: [one("actor/entropy", "entropy")] },
      {
        title: "KL of the update",
        lines: [one("actor/ppo_kl", "to the rollout"), one("actor/kl_loss", "to the reference")],
      },
      { title: "Gradient norm", lines: [one("actor/grad_norm", "actor"), one("critic/grad_norm", "critic")] },
      {
        title: "Clipped",
        lines: [one("actor/clip_fraction", "clipped"), one("actor/dual_clip_fraction", "twice")],
        format: share,
        least: 0,
      },
    ],
  },
  {
    title: "On-policy?",
    charts: [
      {
        title: "Log-prob difference, largest",
        lines: [one("actor/rollout_train_logprob_diff_max", "largest")],
        about: "Between the trainer's and the rollout's log-probs of the same tokens",
      },
      { title: "Log-prob difference, mean", lines: [one("actor/rollout_train_logprob_diff_mean", "mean")] },
      {
        title: "KL between trainer and rollout",
        lines: [one("actor/rollout_train_kl_k1", "k1"), one("actor/rollout_train_kl_k3", "k3")],
      },
      {
        title: "Staleness",
        lines: [one("rollout/staleness/mean", "mean"), one("rollout/staleness/max", "oldest")],
        least: 0,
        about: "Weight versions between sampling and training",
      },
    ],
  },
  {
    title: "Speed",
    charts: [
      { title: "Model tokens per second", lines: [one("perf/model_tokens_per_s", "tokens/s")], least: 0 },
      {
        title: "Seconds per step",
        prefix: "timing_s/",
        without: ["timing_s/step"],
        isStacked: true,
        format: seconds,
      },
    ],
  },
];

/** Returns `[{title, charts: [{title, series, format, ...}]}]` for the metrics of a run. */
export function curves(metrics) {
  const used = new Set(["timing_s/step"]);
  const sections = SECTIONS.map(({ title, charts }) => ({
    title,
    charts: charts.map((chart) => filled(chart, metrics, used)).filter((chart) => chart.series.length > 0),
  }));
  const rest = metrics.names.filter((name) => !used.has(name)).sort();
  sections.push({
    title: "Other metrics",
    isRest: true,
    charts: rest.map((name) => filled(single(name), metrics, used)),
  });
  return sections.filter((section) => section.charts.length > 0);
}

function single(name) {
  return { title: labelOf(name), lines: [one(name, name)], format: formatOf(name) };
}

function filled(chart, metrics, used) {
  const lines = chart.prefix ? prefixed(chart, metrics) : chart.lines;
  const series = [];
  if (chart.band && metrics.series(chart.band[1])) series.push(bandOf(chart.band, metrics));
  for (const { name, label } of lines) {
    used.add(name);
    const found = metrics.series(name);
    if (found)
      series.push({
        label,
        ...found,
        color: series.filter((other) => !other.isBand).length,
        isSparse: isSparse(found, metrics),
      });
  }
  for (const name of chart.band ?? []) used.add(name);
  const within = lines.length ? rangeOf(lines[0].name) : undefined;
  return { format: number, within, ...chart, series: lines.some(({ name }) => metrics.series(name)) ? series : [] };
}

function prefixed({ prefix, without = [] }, metrics) {
  const names = metrics.names.filter((name) => name.startsWith(prefix) && !without.includes(name)).sort();
  return names.map((name) => one(name, labelOf(name.slice(prefix.length))));
}

function bandOf([low, high], metrics) {
  const { steps, values } = metrics.series(high);
  return { label: "range", steps, values, floor: metrics.series(low).values, color: 0, isBand: true };
}

const isSparse = ({ steps }, metrics) => steps.length < metrics.steps.length / 2 && steps.length < 60;
