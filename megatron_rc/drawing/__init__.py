"""Charts by matplotlib, as one picture or on one page that needs no network and no scripts."""
