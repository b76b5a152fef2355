"""The `shardkit` command: thin verbs that parse, call one public function and print."""
