// Colour schemes of tokens. A scheme assigns a CSS class to each token and has a legend.

import { isNumber, number, share } from "./format.js";

const STEPS = 8;

/** Returns `{label, classOf(token), legend: [{class, label}]}` by name, for the values that a trajectory has. */
export function colorings(trajectory) {
  const all = {
    origin: byOrigin(trajectory),
    mask: byMask(trajectory),
    logprob: trajectory.logProbs && byLogProb(trajectory),
    version: byVersion(trajectory),
    advantage: trajectory.advantages && byAdvantage(trajectory),
    difference: trajectory.trainLogProbs && trajectory.logProbs && byDifference(trajectory),
  };
  return Object.fromEntries(Object.entries(all).filter(([, coloring]) => coloring));
}

function byOrigin(trajectory) {
  const classes = new Array(trajectory.length);
  for (const block of trajectory.blocks) classes.fill(`origin-${block.origin}`, block.start, block.end);
  const there = [...new Set(trajectory.blocks.map((block) => block.origin))];
  return {
    label: "Origin",
    classOf: (token) => classes[token],
    legend: there.map((origin) => ({ class: `origin-${origin}`, label: origin })),
  };
}

function byMask({ mask }) {
  return {
    label: "Mask",
    classOf: (token) => (mask[token] ? "mask-1" : "mask-0"),
    legend: [
      { class: "mask-1", label: "1: sampled by the model, in the loss" },
      { class: "mask-0", label: "0: not in the loss" },
    ],
  };
}

function byLogProb({ logProbs, mask }) {
  const limits = [0.9, 0.5, 0.25, 0.1, 0.03, 0.01, 0.001];
  const levelOf = (probability) => limits.findIndex((limit) => probability >= limit);
  return {
    label: "Log-prob",
    classOf(token) {
      if (!mask[token] || !isNumber(logProbs[token])) return "mask-0";
      const level = levelOf(Math.exp(logProbs[token]));
      return `heat-${level < 0 ? limits.length : level}`;
    },
    legend: [...limits, 0].map((limit, level) => ({
      class: `heat-${level}`,
      label: limit ? `≥ ${share(limit)}` : "less",
    })),
  };
}

function byVersion({ versions }) {
  const there = [...new Set(versions)].filter((version) => version >= 0).sort((a, b) => a - b);
  const colorOf = (version) => `version-${there.indexOf(version) % STEPS}`;
  return {
    label: "Weights",
    classOf: (token) => (versions[token] < 0 ? "mask-0" : colorOf(versions[token])),
    legend: there.map((version) => ({ class: colorOf(version), label: `version ${version}` })),
  };
}

function byAdvantage({ advantages, mask }) {
  return signed("Advantage", (token) => (mask[token] ? advantages[token] : NaN), advantages.length);
}

function byDifference(trajectory) {
  return signed("Difference", (token) => trajectory.difference(token), trajectory.length);
}

function signed(label, valueOf, length) {
  let largest = 0;
  for (let token = 0; token < length; token++) {
    const size = Math.abs(valueOf(token));
    if (size > largest) largest = size;
  }
  const levels = [-3, -2, -1, 0, 1, 2, 3];
  const levelOf = (value) => (largest ? Math.round((value / largest) * 3) : 0);
  return {
    label,
    classOf(token) {
      const value = valueOf(token);
      return Number.isNaN(value) ? "mask-0" : `sign-${levelOf(value)}`.replace("--", "-m");
    },
    legend: levels.map((level) => ({
      class: `sign-${level}`.replace("--", "-m"),
      label: number((largest * level) / 3),
    })),
  };
}
