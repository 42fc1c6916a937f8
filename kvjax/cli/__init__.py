"""The command `kvjax`: one file a subcommand, and what they share."""
