// Buttons for common filters and sort orders.

import { h } from "./dom.js";
import { here } from "./router.js";

const QUICK = [
  { label: "All", parameters: {} },
  { label: "Newest step", parameters: (table) => ({ "f.step": table.value("step", newest(table)) }) },
  { label: "Failed", parameters: { "f.failure": "!none" } },
  { label: "Without success", parameters: { "f.is_success": "no" } },
  { label: "With incidents", parameters: { "f.num_incidents": ">0" } },
  { label: "Failed tool calls", parameters: { "f.num_failed_calls": ">0" } },
  { label: "Slowest", parameters: { sort: "-seconds" } },
  { label: "Longest", parameters: { sort: "-response_length" } },
  { label: "Largest mismatch", parameters: { sort: "-logprob_diff_max" } },
];

/** @param apply  Called with the parameters of the pressed button, and whether they are already applied. */
export function quickChips(table, apply) {
  const { parameters } = here();
  return QUICK.map(({ label, parameters: given }) => {
    const wanted = typeof given === "function" ? (table.length ? given(table) : {}) : given;
    const entries = Object.entries(wanted);
    const isOn =
      entries.length > 0 && entries.every(([name, value]) => parameters.get(name) === String(value));
    return h("button.chip", { "aria-pressed": String(isOn), onclick: () => apply(wanted, isOn) }, label);
  });
}

function newest(table) {
  const steps = table.column("step").values;
  let best = 0;
  for (let row = 1; row < table.length; row++) if (steps[row] > steps[best]) best = row;
  return best;
}
