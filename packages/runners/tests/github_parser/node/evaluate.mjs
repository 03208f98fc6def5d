// Evaluates the workflows of a repository for events, as GitHub does: which workflows start, and which jobs
// run on which runners. Reads JSON from standard input and writes JSON; workflows.py describes both.
//
// Exit codes: 0; 1 for invalid input, with the reasons on standard error; others are bugs of this program.

import { readFileSync } from "node:fs";

import { makeContexts, resolve } from "./expressions.mjs";
import { findToken, InputError, parseFiles } from "./files.mjs";
import { readDispatchInputs } from "./inputs.mjs";
import { runWorkflow, walkJobs } from "./jobs.mjs";
import { isStarted } from "./triggers.mjs";

function evaluateCase(given, files) {
  const report = { name: given.name, workflows: {}, jobs: [], skipped: [], errors: [] };
  for (const [file, workflow] of Object.entries(files.own)) {
    report.workflows[file] = isStarted(file, workflow.events, given);
    if (report.workflows[file]) {
      startWorkflow(file, workflow, given, files, report);
    }
  }
  return report;
}

function startWorkflow(file, workflow, given, files, report) {
  const { event_name, event, github, vars } = given;
  const run = {
    file,
    files,
    repository: github.repository,
    sha: github.sha,
    path: [],
    ceiling: null,
    inputs: {},
    given: { outputs: given.outputs[file] ?? {}, results: given.results[file] ?? {} },
    report,
  };
  checkPermissions(workflow, run);
  if (event_name === "workflow_dispatch") {
    const declared = findToken(workflow.root, "on", "workflow_dispatch", "inputs");
    run.inputs = readDispatchInputs(resolve(declared, {}) ?? {}, event.inputs ?? {});
  }
  run.contexts = makeContexts({
    github: {
      event_name,
      workflow: findToken(workflow.root, "name")?.value ?? `.github/workflows/${file}`,
      ...github,
      event: event_name === "workflow_dispatch" ? { ...event, inputs: run.inputs } : event,
    },
    vars,
    inputs: run.inputs,
  });
  runWorkflow(workflow, run);
}

/** Reports the jobs that ask for more permissions than their callers have. */
function checkPermissions(workflow, run) {
  for (const { path, excess } of walkJobs(workflow, run)) {
    if (excess.length > 0) {
      const message = `asks for ${excess.join(", ")}, which its caller does not have`;
      run.report.errors.push({ workflow: run.file, job: path, message });
    }
  }
}

async function main() {
  const input = JSON.parse(readFileSync(0, "utf8"));
  const files = await parseFiles(input);
  const empty = { vars: {}, outputs: {}, results: {} };
  return input.cases.map((given) => evaluateCase({ ...empty, ...given }, files));
}

main().then(
  (reports) => process.stdout.write(JSON.stringify({ cases: reports })),
  (error) => {
    process.exitCode = error instanceof InputError ? 1 : 70;
    process.stderr.write(`${error instanceof InputError ? error.message : error.stack}\n`);
  },
);
