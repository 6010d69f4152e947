// Prompts of all runs. Each leads to its trajectories in every run.

import { debounced, h, replaceChildren } from "./dom.js";
import { headOf } from "./evaluations_page.js";
import { clipped, number, plural } from "./format.js";
import { address, adjust } from "./router.js";

const LETTERS = 300;

export function promptsPage(collection, parameters) {
  const view = { text: parameters.get("text") ?? "", load: 0 };
  const summary = h("p.summary", {}, "Loading…");
  const list = h(".wide", { tabindex: "0", role: "region", "aria-label": "Prompts" });
  const draw = async () => {
    const load = ++view.load;
    const found = await collection.prompts(view.text);
    if (load !== view.load) return;
    replaceChildren(list, found.prompts.length > 0 && promptTable(found.prompts));
    return found;
  };
  const search = h("input", {
    type: "search",
    placeholder: "Find a prompt",
    "aria-label": "Find a prompt",
    value: view.text,
    oninput: debounced((event) => {
      view.text = event.target.value;
      adjust({ text: view.text });
      draw().then((found) => found && (summary.textContent = sentence(found)));
    }),
  });
  const start = async () => {
    await indexRuns(collection, (done, count) => {
      summary.textContent = `Reading the prompts: ${done} of ${plural(count, "run")}.`;
    });
    const found = await draw();
    if (found) summary.textContent = sentence(found);
  };
  whenLoaded(collection, () => start().catch((error) => (summary.textContent = error.message)));
  return {
    element: h(
      ".page",
      {},
      h(".toolbar", {}, h("h1", {}, "Prompts"), h(".spacer"), search),
      summary,
      list,
    ),
    keys: [{ keys: ["/"], about: "find a prompt", action: () => search.focus() }],
    update: () => true,
  };
}

/** Calls `action` once, when the runs are known. */
export function whenLoaded(collection, action) {
  if (collection.isLoaded) return action();
  const stop = collection.onChange(() => {
    if (!collection.isLoaded) return;
    stop();
    action();
  });
}

/** Reads the prompts of all runs, one run after the other. Runs without data are left out. */
export async function indexRuns(collection, onProgress) {
  const { runs } = collection;
  for (const [place, run] of runs.entries()) {
    onProgress(place, runs.length);
    await collection.indexPrompts(run.key).catch(() => null);
  }
}

function sentence({ num_prompts: count, prompts }) {
  if (!count) return "No stored trajectory has such a prompt.";
  const shown = count > prompts.length ? `; the ${prompts.length} of most runs are listed` : "";
  return `${plural(count, "prompt")}${shown}.`;
}

function promptTable(prompts) {
  return h(
    "table.plain",
    {},
    h("caption.visually-hidden", {}, "Prompts"),
    headOf(["prompt", "runs", "trajectories"]),
    h(
      "tbody",
      {},
      prompts.map(({ digest, prompt, runs }) => {
        const counts = Object.values(runs);
        return h(
          "tr",
          {},
          h(
            "th.long",
            { scope: "row" },
            h("a", { href: address("prompt", { digest }) }, clipped(prompt, LETTERS) || "(empty)"),
          ),
          h("td.number", {}, number(counts.length)),
          h("td.number", {}, number(counts.reduce((sum, count) => sum + count, 0))),
        );
      }),
    ),
  );
}
