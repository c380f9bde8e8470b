"""What is known about modules that others wrote: roles of their parameters, sizes, whether they separate documents."""
