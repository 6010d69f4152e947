// Starts the page of several runs.

import { Collection } from "./collection.js";
import { h, replaceChildren } from "./dom.js";
import { evaluationsPage } from "./evaluations_page.js";
import { flipsPage } from "./flips_page.js";
import { plural } from "./format.js";
import { setKeysEverywhere } from "./keys.js";
import { promptPage } from "./prompt_page.js";
import { promptsPage } from "./prompts_page.js";
import { go } from "./router.js";
import { runsPage } from "./runs_page.js";
import { Shell } from "./shell.js";

const PAGES = {
  runs: runsPage,
  prompts: promptsPage,
  prompt: promptPage,
  evaluations: evaluationsPage,
  flips: flipsPage,
};
const MENU = { runs: "Runs", prompts: "Prompts", evaluations: "Evaluations" };

async function start() {
  const collection = new Collection();
  const shell = new Shell({
    pages: PAGES,
    menu: MENU,
    partOf: { prompt: "prompts", flips: "evaluations" },
    data: collection,
  });
  setKeysEverywhere([
    { keys: ["g r"], about: "runs", action: () => go("#/runs") },
    { keys: ["g p"], about: "prompts", action: () => go("#/prompts") },
    { keys: ["g e"], about: "evaluations", action: () => go("#/evaluations") },
  ]);
  collection.onChange(() => {
    replaceChildren(
      shell.status,
      h("span.run-name", { title: collection.path }, collection.name),
      h("span", {}, plural(collection.runs.length, "run")),
    );
    shell.main.ariaBusy = String(!collection.isLoaded);
    shell.notify([
      collection.trouble &&
        `The viewer cannot be reached (${collection.trouble}). The page shows the last data that it received.`,
    ]);
  });
  shell.open();
  await collection.follow();
}

start();
