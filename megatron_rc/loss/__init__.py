"""Policy objectives, their aggregation and what is measured of them."""
