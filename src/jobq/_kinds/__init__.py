"""What an application declares: kinds, handlers, options, unique keys, schedules. Pure."""
