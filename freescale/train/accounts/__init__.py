"""Where the time of a step went: moments on the clocks of host and device, told between ranks, split into bubbles."""
