"""Engine processes: start them, talk to them, watch them, route requests to them."""
