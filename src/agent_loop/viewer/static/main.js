// Starts the page of a run: finds its data source, follows the run, and shows the page that the address names.

import { h, replaceChildren } from "./dom.js";
import { EmbeddedSource } from "./embedded_source.js";
import { EvaluationSource } from "./evaluation_source.js";
import { evaluationsPage } from "./evaluations_page.js";
import { flipsPage } from "./flips_page.js";
import { forkPage } from "./fork_page.js";
import { number } from "./format.js";
import { groupPage } from "./group_page.js";
import { LiveSource } from "./live_source.js";
import { overviewPage } from "./overview_page.js";
import { Run } from "./run.js";
import { Shell } from "./shell.js";
import { tablePage } from "./table_page.js";
import { timePage } from "./time_page.js";
import { trajectoryPage } from "./trajectory_page.js";

const PAGES = {
  overview: overviewPage,
  trajectories: tablePage,
  trajectory: trajectoryPage,
  group: groupPage,
  fork: forkPage,
  time: timePage,
  evaluations: evaluationsPage,
  flips: flipsPage,
};
const MENU = { overview: "Overview", trajectories: "Trajectories", time: "Time" };
const PART_OF = { trajectory: "trajectories", group: "trajectories", fork: "trajectories", flips: "evaluations" };

async function start() {
  const run = new Run((await EmbeddedSource.find()) ?? new LiveSource());
  const shell = new Shell({ pages: PAGES, menu: MENU, partOf: PART_OF, data: run });
  run.evaluations = run.source.isLive ? new EvaluationSource(() => "") : null;
  let numFiles = -1;
  run.onChange(() => {
    if (run.evaluations && run.state && run.state.files.length !== numFiles) {
      numFiles = run.state.files.length;
      showEntry(run.evaluations, shell);
    }
    showStatus(run, shell);
    shell.main.ariaBusy = String(!run.isLoaded);
  });
  shell.open();
  await run.follow();
}

/** Adds the page of evaluations to the menu if there are any. */
async function showEntry(evaluations, shell) {
  const listed = await evaluations.list().catch(() => []);
  shell.setEntry("evaluations", listed.length ? "Evaluations" : null);
}

const WORDS = {
  loading: "loading",
  running: "running",
  finished: "finished",
  quiet: "no new data for a while",
  exported: "a copy",
};

function showStatus(run, shell) {
  const { state, metrics } = run;
  const step = metrics.lastStep === null ? null : `step ${number(metrics.lastStep)}`;
  const steps = step && run.totalSteps ? `${step} of ${number(run.totalSteps)}` : step;
  replaceChildren(
    shell.status,
    h(`span.lamp.${run.status}`, { "aria-hidden": "true" }),
    h("span.run-name", { title: state?.path }, state?.name ?? ""),
    h("span", {}, [WORDS[run.status], steps].filter(Boolean).join(" · ")),
  );
  shell.notify([
    run.trouble && `The viewer cannot be reached (${run.trouble}). The page shows the last data that it received.`,
    run.source.omitted,
    state?.problems.length > 0 && `Unreadable files: ${state.problems.slice(0, 3).join("; ")}`,
    metrics.numDamaged > 0 && `${metrics.numDamaged} damaged lines of metrics.jsonl are skipped.`,
  ]);
}

start();
