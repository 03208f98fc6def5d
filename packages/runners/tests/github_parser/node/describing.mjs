// The report of a job that runs.

import { isSequence } from "@actions/workflow-parser";

import { JobError, makeContexts, resolve, toText } from "./expressions.mjs";
import { findToken } from "./files.mjs";

/**
 * Describes a job for the report.
 *
 * token: the job in its file.
 * matrix: the combination; null without a matrix.
 * place: the `run` of runWorkflow, with the path and the permissions of this job.
 */
export function describeJob(workflow, token, matrix, contexts, place) {
  return {
    workflow: place.file,
    job: place.path.join(" / "),
    matrix: matrix ?? {},
    inputs: place.inputs,
    runs_on: readRunsOn(resolve(token.find("runs-on"), contexts)),
    checkouts: readCheckouts(workflow, token, contexts, place),
    permissions: place.ceiling,
    environment: toText(resolve(token.find("environment"), contexts)) || null,
    timeout_minutes: expect(
      "number",
      resolve(token.find("timeout-minutes"), contexts),
      "timeout-minutes",
    ),
    concurrency: readConcurrency(resolve(token.find("concurrency"), contexts)),
  };
}

function readRunsOn(value) {
  const { group = null, labels = [] } =
    value !== null && typeof value === "object" && !Array.isArray(value)
      ? value
      : { labels: value };
  return { group: group === null ? null : toText(group), labels: [labels].flat().map(toText) };
}

function readConcurrency(value) {
  if (value === undefined) {
    return null;
  }
  const { group, "cancel-in-progress": cancels = false } = value;
  return {
    group: toText(group),
    "cancel-in-progress": expect("boolean", cancels, "cancel-in-progress"),
  };
}

/** GitHub does not convert a string to a number or a boolean; fromJSON does. */
function expect(type, value, key) {
  if (value !== undefined && typeof value !== type) {
    throw new JobError(`${key} is ${JSON.stringify(value)}, and a ${type} is expected`);
  }
  return value ?? null;
}

/** Finds the commits that the steps check out, one for each actions/checkout. */
function readCheckouts(workflow, token, contexts, place) {
  const { github, inputs, vars, secrets } = contexts;
  const steps = token.find("steps");
  if (steps === undefined || !isSequence(steps)) {
    return [];
  }
  const env = {
    ...resolve(findToken(workflow.root, "env"), { github, inputs, vars, secrets }),
    ...resolve(token.find("env"), contexts),
  };
  return [...steps]
    .filter((step) => /^actions\/checkout@/i.test(findToken(step, "uses")?.value ?? ""))
    .map((step) => {
      const known = { ...contexts, ...makeContexts({ env }) };
      const own = { ...env, ...resolve(findToken(step, "env"), known) };
      const ref = findToken(step, "with", "ref");
      return toText(resolve(ref, { ...contexts, ...makeContexts({ env: own }) })) || place.sha;
    });
}
