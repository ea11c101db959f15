"""Grammars that answers are held to: written in Lark, compiled by llguidance, driven token by token."""
