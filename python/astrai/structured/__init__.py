"""Structured output: grammars, and which tokens they allow next.

    grammar        a StructuredOutput as the text of a grammar
    compiler       checks, compiles and caches grammars for one tokenizer
    checker        the child process in which a grammar is tried first
    check_process  what runs in it
    vocabulary     a tokenizer's vocabulary in the form that llguidance takes
    matcher        follows one sample through its grammar

Nothing here needs torch. llguidance is imported when the first grammar is compiled.
"""
