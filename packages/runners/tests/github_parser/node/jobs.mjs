// The jobs of a started workflow: their conditions, machines and inputs.

import { data } from "@actions/expressions";

import { describeJob } from "./describing.mjs";
import { isTrue, JobError, makeContexts, resolve, toText } from "./expressions.mjs";
import { findToken } from "./files.mjs";
import { readCallInputs } from "./inputs.mjs";
import { expandMatrix } from "./matrix.mjs";
import { findExcess, narrow, readPermissions } from "./permissions.mjs";

/**
 * Yields every job of a workflow and of the workflows that it calls, also those that do not run.
 *
 * run: see runWorkflow.
 * Yields: its path, and the permissions that its caller does not have.
 */
export function* walkJobs(workflow, run) {
  for (const job of workflow.jobs) {
    const token = findToken(workflow.root, "jobs", job.id.value);
    const path = [...run.path, job.id.value];
    const called = job.ref && run.files.find(job.ref.value, workflow, run.repository);
    const excess = findExcess(declaredPermissions(workflow, token), run.ceiling);
    yield { path: path.join(" / "), excess };
    if (called) {
      yield* walkJobs(called, {
        ...run,
        path,
        ceiling: effectivePermissions(workflow, token, run),
      });
    }
  }
}

/**
 * Runs the jobs of a workflow in the order of their `needs`.
 *
 * run: {file, files, repository, contexts, path, ceiling, given, report}: the file of the workflow
 *     that the event started; the contexts; the ids and permissions of the calling jobs; the
 *     results and outputs of the case; and the report.
 * Returns: the result and the outputs of each job, by id.
 */
export function runWorkflow(workflow, run) {
  const done = new Map();
  for (const job of inOrder(workflow.jobs)) {
    done.set(job.id.value, runJob(workflow, job, done, run));
  }
  return done;
}

function inOrder(jobs) {
  const ordered = new Set();
  const add = (job) => {
    (job.needs ?? []).forEach((need) => add(jobs.find(({ id }) => id.value === need.value)));
    ordered.add(job);
  };
  jobs.forEach(add);
  return ordered;
}

function runJob(workflow, job, done, run) {
  const path = [...run.path, job.id.value].join(" / ");
  const direct = (job.needs ?? []).map(({ value }) => value);
  const above = new Set(direct.flatMap((need) => [need, ...done.get(need).above]));
  const needs = Object.fromEntries(direct.map((need) => [need, asNeed(done.get(need))]));
  const contexts = { ...run.contexts, ...makeContexts({ needs }) };
  const outputs = run.given.outputs[path];
  try {
    if (!isTrue(job.if.expression, contexts, statusFunctions(above, done))) {
      run.report.skipped.push({ workflow: run.file, job: path });
      return { above, result: "skipped", outputs: {} };
    }
    const ended = runLegs(workflow, job, contexts, run);
    const result = run.given.results[path] ?? ended.result;
    // A skipped job has no outputs.
    return { above, result, outputs: result === "skipped" ? {} : (outputs ?? ended.outputs()) };
  } catch (error) {
    if (!(error instanceof JobError)) {
      throw error;
    }
    run.report.errors.push({ workflow: run.file, job: path, message: error.message });
    return { above, result: "failure", outputs: {} };
  }
}

function asNeed({ result, outputs }) {
  return { result, outputs };
}

/** Runs each combination of the matrix, or once without a matrix. */
function runLegs(workflow, job, contexts, run) {
  const token = findToken(workflow.root, "jobs", job.id.value);
  const strategy = resolve(job.strategy, contexts) ?? {};
  const legs = strategy.matrix === undefined ? [null] : expandMatrix(strategy.matrix);
  const ended = legs.map((matrix) => {
    const leg = { ...contexts, ...makeContexts({ matrix, secrets: {} }) };
    const place = {
      ...run,
      path: [...run.path, job.id.value],
      ceiling: effectivePermissions(workflow, token, run),
    };
    if (job.ref) {
      return runCalled(workflow, job, leg, place);
    }
    run.report.jobs.push(describeJob(workflow, token, matrix, leg, place));
    return { result: "success", outputs: () => ({}) };
  });
  return {
    result: summarize(ended),
    outputs: () => Object.assign({}, ...ended.map((one) => one.outputs())),
  };
}

function runCalled(caller, job, contexts, place) {
  const called = place.files.find(job.ref.value, caller, place.repository);
  const call = findToken(called.root, "on", "workflow_call");
  const { github, vars } = contexts;
  const inputs = readCallInputs(
    resolve(findToken(call, "inputs"), { github, vars, ...makeContexts({ inputs: {} }) }) ?? {},
    resolve(job["input-values"], contexts) ?? {},
  );
  const known = { github, vars, ...makeContexts({ inputs }) };
  const done = runWorkflow(called, { ...place, contexts: known, inputs });
  const jobs = Object.fromEntries([...done].map(([id, ended]) => [id, asNeed(ended)]));
  return {
    result: summarize([...done.values()]),
    outputs: () =>
      Object.fromEntries(
        [...(findToken(call, "outputs") ?? [])].map(({ key, value }) => [
          key.value,
          toText(resolve(findToken(value, "value"), { ...known, ...makeContexts({ jobs }) })),
        ]),
      ),
  };
}

function summarize(ended) {
  const results = ended.map(({ result }) => result);
  const worst = ["failure", "cancelled"].find((result) => results.includes(result));
  return worst ?? (results.every((result) => result === "skipped") ? "skipped" : "success");
}

/** Defines success(), which checks all earlier jobs and not only those in `needs`, and always(). */
function statusFunctions(above, done) {
  const all = [...above].every((name) => done.get(name)?.result === "success");
  const define = (name, value) => ({
    name,
    minArgs: 0,
    maxArgs: 0,
    call: () => new data.BooleanData(value),
  });
  return [define("success", all), define("always", true)];
}

function declaredPermissions(workflow, token) {
  return (
    readPermissions(findToken(token, "permissions")) ??
    readPermissions(findToken(workflow.root, "permissions")) ??
    null
  );
}

function effectivePermissions(workflow, token, run) {
  return narrow(declaredPermissions(workflow, token), run.ceiling);
}
