// Labels and formats of the table's columns, and the columns that are shown by default.

import { number, seconds, signed, labelOf } from "./format.js";

const KNOWN = {
  split: { label: "split", width: 62 },
  step: { label: "step", width: 58 },
  trajectory_id: { label: "trajectory", width: 188, isLink: true },
  prompt: { label: "prompt", width: 240, about: "Last message of the user before the first turn" },
  answer: { label: "last answer", width: 220, about: "Text of the last turn" },
  target: { label: "target", width: 110, about: "The right answer, from the row" },
  group: { label: "group", width: 64 },
  rollout: { label: "rollout", width: 68 },
  branch: { label: "branch", width: 68 },
  agent_name: { label: "agent", width: 110 },
  weight_version: { label: "weights", width: 76, about: "The trainer's weight version when the step began" },
  reward: { label: "reward", width: 78, about: "None if the trajectory failed or was not scored" },
  reward_score: { label: "reward of tools", width: 116, about: "Reward from the loop or its tools" },
  is_success: { label: "success", width: 76 },
  stop_reason: { label: "stop reason", width: 150 },
  failure: { label: "failure", width: 320 },
  num_assistant_turns: { label: "turns", width: 62, about: "Turns of the model" },
  num_turns: {
    label: "turns and replies",
    width: 122,
    about: "Prompt, turns of the model and replies, each counted once",
  },
  num_tool_calls: { label: "calls", width: 60, about: "Tool calls" },
  num_failed_calls: { label: "failed calls", width: 92 },
  num_incidents: {
    label: "incidents",
    width: 82,
    about: "Incidents, such as malformed calls or cut replies",
  },
  prompt_length: { label: "prompt tokens", width: 106, about: "Tokens of the prompt" },
  response_length: { label: "response tokens", width: 120, about: "Tokens of the response" },
  num_model_tokens: { label: "model tokens", width: 100 },
  advantage: { label: "advantage", width: 86, format: signed, about: "Mean over trained tokens" },
  staleness: { label: "staleness", width: 80, about: "Largest staleness of a token, in weight versions" },
  logprob_diff_max: {
    label: "max diff",
    width: 82,
    about: "Largest difference of log-probs between trainer and rollout",
  },
  logprob_diff_mean: {
    label: "mean diff",
    width: 84,
    about: "Mean difference of log-probs between trainer and rollout",
  },
  seconds: { label: "time", width: 82, format: seconds, about: "Time from request to score" },
};

const SHOWN = [
  "split",
  "step",
  "trajectory_id",
  "prompt",
  "answer",
  "target",
  "reward",
  "is_success",
  "stop_reason",
  "num_assistant_turns",
  "num_tool_calls",
  "num_failed_calls",
  "num_incidents",
  "response_length",
  "advantage",
  "staleness",
  "logprob_diff_max",
  "seconds",
  "generate_s",
  "tool_s",
  "failure",
];
const PART = "reward/";
const MOST_PARTS = 8;
const INTERNAL = new Set(["file", "row_in_file"]);

export function describe(name) {
  const known = KNOWN[name];
  if (known) return { name, format: number, about: "", ...known };
  if (name.startsWith(PART)) {
    const label = name.slice(PART.length);
    return {
      name,
      label,
      width: Math.max(78, 9 * label.length + 24),
      format: number,
      about: `Part of the reward, or another value of the reward function: ${label}`,
    };
  }
  if (name.endsWith("_s")) {
    const label = labelOf(name.slice(0, -2));
    return {
      name,
      label,
      width: Math.max(78, 9 * label.length),
      format: seconds,
      about: `Seconds: ${label}`,
    };
  }
  return { name, label: labelOf(name), width: Math.max(72, 8 * name.length), format: number, about: "" };
}

/** Returns all columns that can be shown. */
export function choices(table) {
  const there = table.names.filter((name) => !INTERNAL.has(name));
  const known = Object.keys(KNOWN).filter((name) => table.has(name));
  return [...known, ...there.filter((name) => !KNOWN[name])];
}

/** Returns the columns that are shown by default: those of `SHOWN` and the reward's parts that have a value. */
export function defaultColumns(table) {
  const parts = table.names.filter((name) => name.startsWith(PART)).slice(0, MOST_PARTS);
  return SHOWN.flatMap((name) => (name === "reward" ? ["reward", ...parts] : [name])).filter(
    (name) => table.has(name) && hasValue(table.column(name)),
  );
}

function hasValue({ kind, values }) {
  if (kind === "text") return values.some((code) => code >= 0);
  if (kind === "flag") return values.some((value) => value < 2);
  return values.some((value) => !Number.isNaN(value));
}

export function formatValue(value, { format }) {
  if (value === null || value === undefined) return "–";
  if (value === true) return "yes";
  if (value === false) return "no";
  return typeof value === "number" ? format(value) : value;
}
