"""How the work of a stream is done: in threads, in processes, apart from the trainer. It can never change data."""
