"""The words of Trainwright: data only, shared by every interpreter of a Program.

Read in this order: site (where), ref (which buffer), layout (how it is spread), work (what it costs), action (what is done),
slot (what a schedule yields), program (all of it, with `verify`), event and timeline (what took place), ledger (totals).
"""
