# What is installed if the C++ extension cannot be built: a note with the reason. slm_native/_extension.py reads it.

function(write_without_extension folder reason)
  if(SLM_REQUIRE_EXTENSION)
    message(FATAL_ERROR "The C++ extension of slm_native is not built: ${reason}.")
  endif()
  message(WARNING "The C++ extension of slm_native is not built: ${reason}. Models run on the slower NumPy tier.")
  file(WRITE "${folder}/_native_missing.py"
    "\"\"\"Written by CMake in place of the C++ extension.\"\"\"\n\nREASON = \"${reason}\"\n")
endfunction()

# The first error of a compiler or linker, without characters that a string of Python or CMake could not hold.
function(first_error log result)
  string(REGEX REPLACE "[][;\"\\\\$]" "" log "${log}")
  string(REGEX MATCH "[^\n]*[Ee]rror[ :][^\n]*" line "${log}")
  string(REGEX REPLACE "[^ -~]" "?" line "${line}")
  string(STRIP "${line}" line)
  string(SUBSTRING "${line}" 0 300 line)
  set(${result} "${line}" PARENT_SCOPE)
endfunction()

# Builds the extension in the folder of a configured build, and installs it, or the note.
function(install_extension build configuration extension)
  set(which --target _native)
  if(configuration)
    list(APPEND which --config "${configuration}")
  endif()
  if(NOT DEFINED ENV{CMAKE_BUILD_PARALLEL_LEVEL})
    cmake_host_system_information(RESULT n_cores QUERY NUMBER_OF_LOGICAL_CORES)
    list(APPEND which --parallel ${n_cores})
  endif()
  execute_process(COMMAND "${CMAKE_COMMAND}" --build "${build}" ${which}
    RESULT_VARIABLE status OUTPUT_VARIABLE log ERROR_VARIABLE log ECHO_OUTPUT_VARIABLE ECHO_ERROR_VARIABLE)
  set(files "${extension}")
  if(NOT status EQUAL 0)
    first_error("${log}" error)
    write_without_extension("${build}" "it did not compile at installation (${error})")
    set(files "${build}/_native_missing.py")
  endif()
  file(INSTALL ${files} DESTINATION "${CMAKE_INSTALL_PREFIX}/slm_native" USE_SOURCE_PERMISSIONS)
endfunction()
