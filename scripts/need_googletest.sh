#!/bin/sh
# Makes GoogleTest available to CMake: the system's copy if there is one, else its package where this
# user may install packages. Where neither works CMake fetches the source itself (see
# tests/cpp/CMakeLists.txt), so this script never fails.
set -u

if [ -f /usr/src/googletest/CMakeLists.txt ] || [ -f /usr/include/gtest/gtest.h ]; then
  exit 0
fi
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -q && apt-get install -q -y --no-install-recommends googletest libgtest-dev && exit 0
fi
echo "GoogleTest is not installed (Debian, Ubuntu: libgtest-dev); CMake will fetch its source."
