"""The commands of the command line, one a module.

Each has a `DESCRIPTION`, an `EXAMPLE`, `add_options(parser)` and `run(arguments)`; see
`deferred_init.cli.Command`. What a command needs beyond its options is imported when
it runs.
"""
