"""The messages of Envoy's external processing (`envoy.service.ext_proc.v3`) that a picker needs.

This module makes them, in a descriptor pool of their own, because the package with all of Envoy's messages
overwrites files of OpenTelemetry. The wire has only numbers and types, so a map is a repeated `Entry`
here, and an enum is a number.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_MESSAGES = """\
ProcessingRequest: HttpHeaders request_headers 2, HttpHeaders response_headers 3, HttpBody request_body 4, HttpBody response_body 5, HttpTrailers request_trailers 6, HttpTrailers response_trailers 7, Metadata metadata_context 8, *Entry attributes 9, ProtocolConfiguration protocol_config 11
HttpHeaders: HeaderMap headers 1, bool end_of_stream 3
HeaderMap: *HeaderValue headers 1
HeaderValue: string key 1, string value 2, bytes raw_value 3
HttpBody: bytes body 1, bool end_of_stream 2
HttpTrailers: HeaderMap trailers 1
Metadata: *Entry filter_metadata 1
ProtocolConfiguration: int32 request_body_mode 1, int32 response_body_mode 2
Entry: string key 1, Struct value 2
Struct: *Field fields 1
Field: string key 1, Value value 2
Value: string string_value 3, Struct struct_value 5, ListValue list_value 6
ListValue: *Value values 1
ProcessingResponse: HeadersOrBody request_headers 1, HeadersOrBody response_headers 2, HeadersOrBody request_body 3, HeadersOrBody response_body 4, Trailers request_trailers 5, Trailers response_trailers 6, ImmediateResponse immediate_response 7, Struct dynamic_metadata 8
HeadersOrBody: CommonResponse response 1
CommonResponse: HeaderMutation header_mutation 2, BodyMutation body_mutation 3
HeaderMutation: *HeaderValueOption set_headers 1, *string remove_headers 2
HeaderValueOption: HeaderValue header 1, int32 append_action 3
BodyMutation: StreamedBodyResponse streamed_response 3
StreamedBodyResponse: bytes body 1, bool end_of_stream 2
Trailers: HeaderMutation header_mutation 1
ImmediateResponse: HttpStatus status 1, HeaderMutation headers 2, bytes body 3
HttpStatus: int32 code 1
"""
"""Each line is a message; each field has a type, `*` if it is repeated, a name and a number."""


def _classes(*names: str) -> list[Any]:
    file = descriptor_pb2.FileDescriptorProto(name="ext_proc", package="ext_proc", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto.Type
    for line in _MESSAGES.splitlines():
        name, _, fields = line.partition(": ")
        message = file.message_type.add(name=name)
        for kind, field, number in (part.split() for part in fields.split(", ")):
            label = "LABEL_REPEATED" if kind.startswith("*") else "LABEL_OPTIONAL"
            made = message.field.add(name=field, number=int(number), label=label)
            plain = kind.removeprefix("*")
            if plain.islower():
                made.type = kinds.Value(f"TYPE_{plain.upper()}")
            else:
                made.type, made.type_name = kinds.TYPE_MESSAGE, f".ext_proc.{plain}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return [message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ext_proc.{name}")) for name in names]


ProcessingRequest, ProcessingResponse = _classes("ProcessingRequest", "ProcessingResponse")
FULL_DUPLEX_STREAMED = 4
"""The mode of bodies that endpoint pickers use."""
OVERWRITE_IF_EXISTS_OR_ADD = 2
"""An `append_action`."""
