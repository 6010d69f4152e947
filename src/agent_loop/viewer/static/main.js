// Starts the page: finds its data source and shows the page that the address names.

import { h, replaceChildren } from "./dom.js";
import { themeSwitch } from "./color_theme.js";
import { forgetCharts } from "./chart.js";
import { EmbeddedSource } from "./embedded_source.js";
import { forkPage } from "./fork_page.js";
import { number } from "./format.js";
import { groupPage } from "./group_page.js";
import { listenToKeys, setKeys, showHelp } from "./keys.js";
import { LiveSource } from "./live_source.js";
import { overviewPage } from "./overview_page.js";
import { address, here, onChange } from "./router.js";
import { Run } from "./run.js";
import { tablePage } from "./table_page.js";
import { timePage } from "./time_page.js";
import { trajectoryPage } from "./trajectory_page.js";

/** A page is a function of the run and its parameters that returns `{element, keys, update, leave}`. `update` is called
 * with new parameters, and returns false if the page has to be created again. */
const PAGES = {
  overview: overviewPage,
  trajectories: tablePage,
  trajectory: trajectoryPage,
  group: groupPage,
  fork: forkPage,
  time: timePage,
};
const MENU = { overview: "Overview", trajectories: "Trajectories", time: "Time" };
const PART_OF = { trajectory: "trajectories", group: "trajectories", fork: "trajectories" };

async function start() {
  const run = new Run((await EmbeddedSource.find()) ?? new LiveSource());
  const main = h("main", { id: "main", tabindex: "-1", "aria-busy": "true" });
  const menu = h("nav", { "aria-label": "Pages" });
  const status = h(".status", { role: "status" });
  const notice = h(".notice", { role: "note", hidden: true });
  document.body.append(
    h(
      "a.skip",
      { href: "#main", onclick: (event) => (event.preventDefault(), main.focus()) },
      "Skip to content",
    ),
    h(
      "header.top",
      {},
      h("a.brand", { href: "#/overview" }, "agent-loop"),
      menu,
      status,
      helpButton(),
      themeSwitch(),
    ),
    notice,
    main,
  );
  run.onChange(() => {
    showStatus(run, status, notice);
    main.ariaBusy = String(!run.isLoaded);
  });
  listenToKeys();
  const show = pageShower(run, main, menu);
  onChange(show);
  show(here());
  await run.follow();
}

function pageShower(run, main, menu) {
  let shown = null;
  let name = "";
  return ({ page, parameters }) => {
    if (page === name && shown?.update?.(parameters) !== false && shown?.update) return;
    shown?.leave?.();
    forgetCharts();
    name = page;
    shown = (PAGES[page] ?? missingPage)(run, parameters);
    replaceChildren(main, shown.element);
    setKeys(shown.keys ?? []);
    replaceChildren(menu, menuLinks(PART_OF[page] ?? page));
    document.title = `${MENU[page] ?? page} · agent-loop view`;
    scrollTo(0, 0);
    shown.shown?.();
  };
}

function menuLinks(current) {
  return Object.entries(MENU).map(([page, label]) =>
    h("a", { href: address(page), "aria-current": page === current ? "page" : null }, label),
  );
}

function missingPage() {
  return {
    element: h(
      "section.empty",
      {},
      h("h1", {}, "Page not found"),
      h("a", { href: "#/overview" }, "Overview"),
    ),
  };
}

function helpButton() {
  return h("button.quiet", { onclick: showHelp, "aria-label": "Keys", title: "Keys (?)" }, "?");
}

const WORDS = {
  loading: "loading",
  running: "running",
  finished: "finished",
  quiet: "no new data for a while",
  exported: "a copy",
};

function showStatus(run, status, notice) {
  const { state, metrics } = run;
  const step = metrics.lastStep === null ? null : `step ${number(metrics.lastStep)}`;
  const steps = step && run.totalSteps ? `${step} of ${number(run.totalSteps)}` : step;
  replaceChildren(
    status,
    h(`span.lamp.${run.status}`, { "aria-hidden": "true" }),
    h("span.run-name", { title: state?.path }, state?.name ?? ""),
    h("span", {}, [WORDS[run.status], steps].filter(Boolean).join(" · ")),
  );
  const troubles = [
    run.trouble && `The viewer cannot be reached (${run.trouble}). The page shows the last data that it received.`,
    run.source.omitted,
    state?.problems.length > 0 && `Unreadable files: ${state.problems.slice(0, 3).join("; ")}`,
    metrics.numDamaged > 0 && `${metrics.numDamaged} damaged lines of metrics.jsonl are skipped.`,
  ].filter(Boolean);
  const message = troubles.join(" ");
  if (notice.textContent !== message) notice.textContent = message;
  notice.hidden = !message;
}

start();
