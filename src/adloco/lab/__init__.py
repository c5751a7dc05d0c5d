"""Research options, a folder each; any of them can be removed, because nothing else imports it."""
