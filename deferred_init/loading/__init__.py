"""Loading weights: what goes where, decided first, and the engine that moves it."""
