"""The `shardkit` command: each verb parses its options, calls one public function and prints the result."""
