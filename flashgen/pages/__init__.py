"""What the pages that flashgen writes have in common: one HTML file each, with its data inside, and nothing that it has to fetch."""
