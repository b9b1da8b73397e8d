"""The subcommands of `megatron-palimpsa prep`, one module a family."""
