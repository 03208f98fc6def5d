// The report of a job that runs.

import { isBasicExpression, isSequence } from "@actions/workflow-parser";

import { JobError, makeContexts, resolve, toText } from "./expressions.mjs";
import { findToken } from "./files.mjs";
import { withoutWriting } from "./permissions.mjs";

/** Makes the name that GitHub displays: `name` or the id, and matrix values missing in it. */
export function makeName(job, matrix, contexts) {
  const name = toText(resolve(job.name, contexts));
  return matrix === null || isBasicExpression(job.name)
    ? name
    : `${name} (${leaves(matrix).join(", ")})`;
}

function leaves(value) {
  return value !== null && typeof value === "object"
    ? Object.values(value).flatMap(leaves)
    : [toText(value)];
}

/**
 * Describes a job for the report.
 *
 * token: the job in its file.
 * matrix: the combination; null without a matrix.
 * place: the `run` of runWorkflow, with the path, the name and the permissions of this job.
 */
export function describeJob(workflow, token, matrix, contexts, place) {
  return {
    workflow: place.file,
    job: place.path.join(" / "),
    name: place.names.join(" / "),
    matrix: matrix ?? {},
    inputs: place.inputs,
    runs_on: readRunsOn(resolve(token.find("runs-on"), contexts)),
    checkouts: readCheckouts(workflow, token, contexts, place),
    permissions: place.isFromFork ? withoutWriting(place.ceiling) : place.ceiling,
    environment: readEnvironment(resolve(token.find("environment"), contexts)),
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
  const found = [labels].flat().map(toText);
  if (found.includes("") || group === "" || (group === null && found.length === 0)) {
    throw new JobError(`runs-on names no runner: ${JSON.stringify(value)}`);
  }
  return { group: group === null ? null : toText(group), labels: found };
}

function readEnvironment(value) {
  const name = value !== null && typeof value === "object" ? value.name : value;
  return name === undefined || name === "" ? null : toText(name);
}

function readConcurrency(value) {
  if (value === undefined) {
    return null;
  }
  const { group, "cancel-in-progress": cancels = false } =
    value !== null && typeof value === "object" ? value : { group: value };
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
      const read = (key) =>
        toText(
          resolve(findToken(step, "with", key), { ...contexts, ...makeContexts({ env: own }) }),
        );
      const ref = read("ref");
      const repository = read("repository") || place.repository;
      // For another repository, an empty ref is the default branch.
      return repository === place.repository ? ref || place.sha : `${repository}@${ref}`;
    });
}
