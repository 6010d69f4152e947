// Load of each server: requests in flight, tokens per second, and weight versions.

import { h, svg } from "./dom.js";
import { compact, number, plural, seconds } from "./format.js";

const BINS = 300;
const WIDTH = 1000;
const HEIGHT = 44;
const STRIPE = 5;

export function serverLoad(entries, range) {
  const servers = new Map();
  for (const { spans } of entries) {
    for (const span of spans) {
      if (span.kind !== "generate") continue;
      if (!servers.has(span.name)) servers.set(span.name, []);
      servers.get(span.name).push(span);
    }
  }
  const loads = [...servers]
    .sort(([one], [other]) => one.localeCompare(other, "en", { numeric: true }))
    .map(([name, spans]) => ({ name, ...loadOf(spans, range) }));
  const mostRequests = Math.max(1, ...loads.map(({ requests }) => Math.max(...requests)));
  const mostTokens = Math.max(1e-9, ...loads.map(({ tokens }) => Math.max(...tokens)));
  return [
    h(
      "h2",
      {},
      "Servers",
      h(
        "span.aside",
        {},
        h("span.line-key.requests"),
        `requests in flight, up to ${number(mostRequests)} `,
        h("span.line-key.speed"),
        `tokens per second, up to ${compact(mostTokens)}`,
      ),
    ),
    h(
      ".loads",
      { tabindex: "0", role: "region", "aria-label": "Load of each server" },
      loads.map((load) => rowOf(load, { mostRequests, mostTokens, range })),
    ),
  ];
}

function loadOf(spans, { from, to }) {
  const requests = new Float64Array(BINS);
  const tokens = new Float64Array(BINS);
  const versions = new Array(BINS).fill(null);
  const size = (to - from) / BINS;
  let total = 0;
  for (const { start, end, details } of spans) {
    const first = Math.max(0, Math.floor((start - from) / size));
    const last = Math.min(BINS - 1, Math.floor((end - from) / size));
    const rate = (details.num_tokens ?? 0) / Math.max(end - start, 1e-9);
    for (let bin = first; bin <= last; bin++) {
      const covered = Math.min(end, from + (bin + 1) * size) - Math.max(start, from + bin * size);
      requests[bin] += Math.max(0, covered) / size;
      tokens[bin] += (rate * Math.max(0, covered)) / size;
      if (details.weight_version !== undefined)
        versions[bin] = Math.max(versions[bin] ?? 0, details.weight_version);
    }
    if (end > from && start < to) total += details.num_tokens ?? 0;
  }
  return { requests, tokens, versions, total, count: spans.length, mean: total / (to - from) };
}

function rowOf(
  { name, requests, tokens, versions, total, count, mean },
  { mostRequests, mostTokens, range },
) {
  const x = (bin) => ((bin * WIDTH) / BINS).toFixed(1);
  const y = (value, most) => (HEIGHT - STRIPE - 1 - (value / most) * (HEIGHT - STRIPE - 3)).toFixed(1);
  const steps = [...requests]
    .map(
      (value, bin) =>
        `${bin ? "L" : "M"}${x(bin)} ${y(value, mostRequests)}L${x(bin + 1)} ${y(value, mostRequests)}`,
    )
    .join("");
  const speed = [...tokens].map((value, bin) => `L${x(bin + 0.5)} ${y(value, mostTokens)}`).join("");
  const title = `${name}: ${plural(count, "completion")}, ${compact(total)} tokens, ${compact(mean)} tokens per second on average over ${seconds(range.to - range.from)}`;
  return h(
    ".load-row",
    {},
    h(
      ".load-name",
      { title },
      h("b", {}, name || "server"),
      h("span.muted", {}, `${compact(mean)} tokens/s`),
    ),
    svg(
      "svg.load",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title },
      svg("title", {}, title),
      svg("path.speed", { d: `M0 ${HEIGHT - STRIPE - 1}${speed}L${WIDTH} ${HEIGHT - STRIPE - 1}Z` }),
      svg("path.requests", { d: steps }),
      stripes(versions).map(({ version, from, to }) =>
        svg(
          `rect.version-${version % 8}`,
          { x: x(from), y: HEIGHT - STRIPE, width: Number(x(to)) - Number(x(from)), height: STRIPE },
          svg("title", {}, `weights ${version}`),
        ),
      ),
    ),
  );
}

function stripes(versions) {
  const found = [];
  versions.forEach((version, bin) => {
    if (version === null) return;
    const last = found.at(-1);
    if (last?.version === version && last.to === bin) last.to = bin + 1;
    else found.push({ version, from: bin, to: bin + 1 });
  });
  return found;
}
