"""Parts that layers of several models share: keyed dropout, feed-forward parts, experts and their router."""
