"""The command line: one module a noun, each command a few lines that call one function.

Last in the flow. Nothing heavy (torch, mlflow, pandas, plotting) is imported before the command that needs it runs.
"""
