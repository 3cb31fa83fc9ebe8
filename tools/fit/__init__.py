"""The page "Will it fit?": its fields, its answers, and how both look. The answers are computed in the browser, too."""
