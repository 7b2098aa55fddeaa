"""Every statement that jobq sends, as operations: generators that know no driver and do no I/O."""
