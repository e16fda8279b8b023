"""The command line: one file a command, `options` what they have in common, `main` what starts them."""
