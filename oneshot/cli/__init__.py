"""The command lines: parse options, call the pipeline or the evaluation, print."""
