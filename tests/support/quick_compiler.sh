#!/usr/bin/env bash
# The C++ compiler with few optimizations, for tests that build a runtime of their own: it takes less than half the time.
exec "${CXX:-g++}" "${@/#-O[23]/-O1}"
