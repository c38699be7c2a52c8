"""What people look at (floor 6): tables, pictures, trace files and HTML reports.

Data is exported first and drawn second. matplotlib and pandas are imported only here, and only inside the functions
that use them.

It may import every package but `twofold`.
"""
